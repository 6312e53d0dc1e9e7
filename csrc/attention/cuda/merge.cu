// Merges the partial softmax states of the tiles that the work list cut, or whose first keys are shared, and
// writes their rows.
//
// A thread block takes one merge entry and kv head. With few rows and many states (decode), several warps
// share a row, each with every n-th state, and meet in shared memory; with many rows (prefill) a warp takes
// whole rows. Single tokens with few states, of which a step of many sharers has thousands, are dealt out to
// warps beforehand.
#include <cuda_runtime.h>

#include "attention/cuda/device_args.cuh"
#include "attention/cuda/merge_rows.cuh"
#include "device/launch.cuh"
#include "device/reductions.cuh"

namespace bequest::cuda {
namespace {

constexpr int kWarps = kMergeWarps;

// Merges the rows [first, first + kWarps) of an entry, or all of fewer. By the whole block.
template <int D>
__device__ void merge_rows(const AttentionArgs& a, const MergeEntry& entry, int first,
                           LaneState<D> (&shared)[kWarps][32]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rows = entry.num_tokens * a.group;
  const MergePart own(warp, rows);
  const int warps_per_row = own.warps_per_row, part = own.part, row = first + own.row;
  const bool has_row = row < rows && part < warps_per_row;
  LaneState<D> total;
  if (has_row) total = merge_row<D>(a, entry, blockIdx.y, row, part, warps_per_row, lane);
  if (warps_per_row > 1) {
    __syncthreads();  // the last entry's states have been read
    shared[warp][lane] = total;
    __syncthreads();
    if (part == 0)
      for (int other = 1; other < warps_per_row; ++other) total.merge(shared[warp + other * rows][lane]);
  }
  if (has_row && part == 0) write_row<D>(a, entry, blockIdx.y, row, total, lane);
}

template <int D>
__global__ void __launch_bounds__(kWarps * 32) merge_kernel(const __grid_constant__ AttentionArgs a) {
  __shared__ LaneState<D> shared[kWarps][32];
  __shared__ MergeEntry first_entry;  // read before states are there, like those of the warps
  // The product that follows may ask for its weights meanwhile.
  let_next_start();
  const int num_merges = __ldg(a.work_list);
  SmallEntries<kWarps> small(a, num_merges);
  if (threadIdx.x == 0 && static_cast<int>(blockIdx.x) < num_merges) first_entry = load_merge(a, blockIdx.x);
  // Even a block without work waits: the grid must not end before the one whose states it merges.
  wait_for_previous();
  small.merge<D>(a, blockIdx.y);
  __syncthreads();
  for (int index = blockIdx.x; index < num_merges; index += gridDim.x) {
    const MergeEntry entry = index == static_cast<int>(blockIdx.x) ? first_entry : load_merge(a, index);
    if (is_small(entry)) continue;
    for (int first = 0; first < entry.num_tokens * a.group; first += kWarps)
      merge_rows<D>(a, entry, first, shared);
  }
}

template <int D>
void launch_dim(const AttentionArgs& a, int blocks_per_head, Stream stream) {
  const dim3 grid(blocks_per_head, a.num_kv_heads);
  launch(merge_kernel<D>, {.grid = grid, .block = kWarps * kWarp, .overlaps_previous = true}, stream, a);
}

}  // namespace

void launch_merge(const AttentionArgs& a, int blocks_per_head, Stream stream) {
  switch (a.head_dim) {
    case 64:
      return launch_dim<64>(a, blocks_per_head, stream);
    case 128:
      return launch_dim<128>(a, blocks_per_head, stream);
    case 256:
      return launch_dim<256>(a, blocks_per_head, stream);
  }
  fail("bf16 attention: head_dim must be 64, 128 or 256");
}

}  // namespace bequest::cuda
