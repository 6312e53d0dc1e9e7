// What adapters add, in one kernel: x times A, then what comes of that times B. Each block has a run of A's
// units and one of B's, and waits in between for the other blocks that have the same tile.
//
// It cannot hang: B's units wait for A's alone, which wait for nobody and come first in every block; there
// are no more blocks than the chip has room for at once; whatever else holds that room ends without them, and
// the grid behind this one is let in when all blocks have begun. Should that ever be untrue, waiting ends in
// a trap.
#include <algorithm>

#include "ops/cuda/lora_expand.cuh"
#include "ops/cuda/lora_shrink.cuh"

namespace bequest::cuda {
namespace lora {
namespace {

enum class Work { kShrink, kExpand, kBoth };

template <Work kWork, bool kStores>
__global__ __launch_bounds__(kThreads, kBlocks) void add_kernel(const __grid_constant__ LoraAddParams p,
                                                                const __grid_constant__ Sizes sizes) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ Ring ring;
  __shared__ SharedTile tile;
  let_next_start();
  ring.init();
  if (p.tiles.made_in_step) wait_for_previous();
  const int tiles = num_tiles(p.tiles), units = tiles * sizes.of_b;
  const Run of_a = kWork == Work::kExpand ? Run{0, 0} : own_run(tiles * sizes.of_a);
  const Run of_b = kWork == Work::kShrink ? Run{0, 0} : own_run(units);
  const uint32_t stages = shared_address(shared);
  int32_t* const counts = kWork == Work::kBoth ? p.site.counts : nullptr;
  uint8_t* const behind = shared + kStages * kStageBytes;
  Place at;
  if (threadIdx.x >= kConsumers) {
    bring_a(p, sizes, of_a, ring, stages, at);
    if (threadIdx.x > kConsumers) return;
    bring_b(p, sizes, of_b, ring, stages, at);
    if (kWork == Work::kBoth) leave_tiles(p, sizes, of_b, units, ring);
    return;
  }
  if constexpr (kWork == Work::kExpand)
    wait_for_previous();
  else
    shrink(p, sizes, of_a, ring, stages, *reinterpret_cast<Sums*>(behind), counts, at);
  if (of_b.begin == of_b.end) return;
  Multiplier<kStores> multiplier(sizes, ring, at, shared, tile, reinterpret_cast<BFloat16*>(behind));
  Stretch stretch(sizes, of_b);
#pragma unroll 1
  do multiplier.run(p, stretch, counts);
  while (stretch.advance(sizes, of_b));
}

Sizes sizes_of(const LoraAddParams& p) {
  const LoraSite& site = p.site;
  const int64_t pieces = lora_pieces(site.in_features), of_a = site.num_parts * pieces,
                of_b = ceil_div(site.out_features, kUnitColumns);
  check(std::max(of_a, of_b) * p.tiles.most_tiles <= INT32_MAX && site.in_features <= INT32_MAX &&
            pieces * p.num_rows <= INT32_MAX && site.num_slots * site.num_parts <= INT32_MAX,
        "lora: sizes");
  return {.parts = static_cast<int>(site.num_parts),
          .pieces = static_cast<int>(pieces),
          .most_rank = static_cast<int>(site.most_rank),
          .depth = static_cast<int>(site.in_features),
          .columns = static_cast<int>(site.out_features),
          .num_rows = static_cast<int>(p.num_rows),
          .of_a = static_cast<int>(of_a),
          .of_b = static_cast<int>(of_b)};
}

// How many blocks have room on a multiprocessor at once.
template <class... Params>
int64_t blocks_at_once(void (*kernel)(Params...), size_t shared_bytes) {
  detail::allow_shared_bytes(kernel, shared_bytes);
  int blocks = 0;
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, shared_bytes));
  return blocks;
}

template <Work kWork, bool kStores>
void launch_work(const LoraAddParams& p, Stream stream) {
  const Sizes sizes = sizes_of(p);
  const int64_t shrunk_bytes = kLoraRows * p.site.num_parts * p.site.most_rank * 2;
  const auto bytes =
      static_cast<size_t>(kStages * kStageBytes + std::max<int64_t>(shrunk_bytes, int64_t{sizeof(Sums)}));
  const auto kernel = add_kernel<kWork, kStores>;
  const int64_t room = multiprocessors() * blocks_at_once(kernel, bytes);
  launch(
      kernel,
      {.grid = static_cast<unsigned>(std::min(std::max(sizes.of_a, sizes.of_b) * p.tiles.most_tiles, room)),
       .block = kThreads,
       .shared_bytes = bytes,
       .overlaps_previous = true},
      stream, p, sizes);
}

template <bool kStores>
void launch_all(const LoraAddParams& p, Stream stream) {
  if (p.tiles.most_tiles <= kMostCountedTiles) return launch_work<Work::kBoth, kStores>(p, stream);
  launch_work<Work::kShrink, kStores>(p, stream);
  launch_work<Work::kExpand, kStores>(p, stream);
}

}  // namespace
}  // namespace lora

void lora_add(const LoraAddParams& p, Stream stream) {
  lora::check_site(p.site);
  check(p.tiles.rows_of_x >= 1 && p.tiles.rows_of_x <= INT32_MAX, "lora_add: rows of x");
  if (p.tiles.most_tiles == 0) return;
  if (!p.site.has_tensor_cores()) {
    check(!p.stores, "lora_add: a site without tensor cores adds");
    lora::shrink_rows(p, stream);
    return lora::expand_rows(p, stream);
  }
  check(is_aligned(p.x, 16) && is_aligned(p.y, 4), "lora_add: rows must be aligned");
  if (p.stores) return lora::launch_all<true>(p, stream);
  lora::launch_all<false>(p, stream);
}

void lora_expand(const LoraAddParams& p, Stream stream) {
  lora::check_site(p.site);
  if (p.tiles.most_tiles == 0) return;
  if (!p.site.has_tensor_cores()) return lora::expand_rows(p, stream);
  check(is_aligned(p.y, 4), "lora_expand: rows must be aligned");
  lora::launch_work<lora::Work::kExpand, false>(p, stream);
}

}  // namespace bequest::cuda
