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

template <Work kWork>
__global__ __launch_bounds__(kThreads, kBlocks) void add_kernel(const __grid_constant__ LoraAddParams p) {
  constexpr bool kShrinks = kWork != Work::kExpand, kExpands = kWork != Work::kShrink;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ Ring ring;
  __shared__ SharedTile tile;
  let_next_start();
  ring.init();
  if (p.tiles.made_in_step) wait_for_previous();
  const int64_t tiles = num_tiles(p.tiles);
  const int64_t expanding = tiles * expand_units(p.site);
  const Run of_a = kShrinks ? own_run(tiles * shrink_units(p.site)) : Run{0, 0};
  Run of_b = kExpands ? own_run(expanding) : Run{0, 0};
  const uint32_t stages = shared_address(shared);
  int32_t* const counts = kWork == Work::kBoth ? p.site.counts : nullptr;
  uint8_t* const behind = shared + kStages * kStageBytes;
  Place at;
  if (threadIdx.x >= kConsumers) {
    bring_a(p, of_a, ring, stages, at);
    if (threadIdx.x > kConsumers) return;
    bring_b(p, of_b, ring, stages, at);
    if (counts != nullptr) leave_tiles(p, of_b, expanding, ring, counts);
    return;
  }
  wait_for_previous();
  shrink(p, of_a, ring, stages, *reinterpret_cast<Sums*>(behind), counts, at);
  Multiplier multiplier(p, ring, at, shared, tile, reinterpret_cast<BFloat16*>(behind));
  const int each = expand_units(p.site);
  while (of_b.begin < of_b.end) multiplier.run(p, take_stretch(of_b, each), counts);
}

template <Work kWork>
void launch_work(const LoraAddParams& p, Stream stream) {
  const LoraSite& site = p.site;
  const int64_t shrunk_bytes = kLoraRows * site.num_parts * site.most_rank * 2;
  const auto bytes =
      static_cast<size_t>(kStages * kStageBytes + std::max<int64_t>(shrunk_bytes, int64_t{sizeof(Sums)}));
  const int64_t units = std::max<int64_t>(shrink_units(site), expand_units(site)) * p.tiles.most_tiles;
  const auto kernel = add_kernel<kWork>;
  const int64_t room = int64_t{multiprocessors()} * blocks_at_once(kernel, kThreads, bytes);
  launch(kernel,
         {.grid = static_cast<unsigned>(std::min(units, room)),
          .block = kThreads,
          .shared_bytes = bytes,
          .overlaps_previous = true},
         stream, p);
}

}  // namespace
}  // namespace lora

void lora_add(const LoraAddParams& p, Stream stream) {
  using lora::Work;
  lora::check_site(p.site);
  check(p.tiles.rows_of_x >= 1 && p.tiles.rows_of_x <= INT32_MAX, "lora_add: rows of x");
  if (p.tiles.most_tiles == 0) return;
  if (!p.site.has_tensor_cores()) {
    check(!p.stores, "lora_add: a site without tensor cores adds");
    lora::shrink_rows(p, stream);
    return lora::expand_rows(p, stream);
  }
  check(is_aligned(p.x, 16) && is_aligned(p.y, 4), "lora_add: rows must be aligned");
  if (p.tiles.most_tiles <= kMostCountedTiles) return lora::launch_work<Work::kBoth>(p, stream);
  lora::launch_work<Work::kShrink>(p, stream);
  lora::launch_work<Work::kExpand>(p, stream);
}

void lora_expand(const LoraAddParams& p, Stream stream) {
  lora::check_site(p.site);
  if (p.tiles.most_tiles == 0) return;
  if (!p.site.has_tensor_cores()) return lora::expand_rows(p, stream);
  check(is_aligned(p.y, 4), "lora_expand: rows must be aligned");
  lora::launch_work<lora::Work::kExpand>(p, stream);
}

}  // namespace bequest::cuda
