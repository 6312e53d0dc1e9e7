#include "ops/linear_amx.h"

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "core/isa.h"
#include "core/threads.h"

namespace bequest {

#if defined(__x86_64__)
void linear_amx(const LinearParams& p) {
  check(current_isa() == Isa::kAmx, "linear: this chip has no matrix units");
  TiledProduct product{.params = p,
                       .rows_in_tile = std::min(p.num_tokens, kTileSide),
                       .row_tiles = (p.num_tokens + kTileSide - 1) / kTileSide,
                       .k_tiles = num_k_tiles(p.in_features),
                       .rows = nullptr};
  const int64_t num_tiles = product.row_tiles * product.k_tiles;
  const int64_t row_bytes = num_tiles * product.rows_in_tile * kTileDepth * int64_t{sizeof(BFloat16)};
  const int threads = num_threads();
  // malloc keeps what the last call freed.
  const std::unique_ptr<void, decltype(&std::free)> scratch(
      std::aligned_alloc(64, static_cast<size_t>(row_bytes + kItemSumBytes * threads)), &std::free);
  check(scratch != nullptr, "linear: out of memory");
  product.rows = static_cast<BFloat16*>(scratch.get());
  char* const sums = static_cast<char*>(scratch.get()) + row_bytes;

  parallel_for(num_tiles, 1 + 16 * kTileSide / product.rows_in_tile,
               [&](int64_t begin, int64_t end) { amx::round_rows(product, begin, end); });
  const int64_t strips = num_strips(p.out_features) / (p.gated() ? 2 : 1);
  const int64_t blocks = (product.row_tiles + kItemRowTiles - 1) / kItemRowTiles;
  // Many small items: where another guest of the machine slows one thread down, the others wait for it at the
  // end of every product, for half an item on average.
  const int64_t group = std::max<int64_t>(strips * blocks / (threads * 16), 1);
  const int64_t groups = (strips + group - 1) / group;
  for_each_item(groups * blocks, [&](int64_t i, int worker) {
    const int64_t block = i / groups, first = i % groups * group;
    const TiledItem item{.row_begin = product.row_tiles * block / blocks,
                         .row_end = product.row_tiles * (block + 1) / blocks,
                         .strip_begin = first,
                         .strip_end = std::min(first + group, strips)};
    amx::multiply_strips(product, item, reinterpret_cast<float*>(sums + worker * kItemSumBytes));
  });
}
#else
void linear_amx(const LinearParams&) { fail("linear: this chip has no matrix units"); }
#endif

}  // namespace bequest
