// The merge of a step without prefill tiles, by the decode grid itself: a kernel of its own would cost two
// microseconds a layer, and most of that even where there is nothing to merge.
//
// The blocks of a head count themselves when their states are written. Those that merge wait for all of them.
// It cannot hang for the reasons that join.cuh gives: nobody waits before it has counted itself. What is
// merged with what, and in which order, is as in merge.cu.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "attention/cuda/device_args.cuh"
#include "attention/cuda/join.cuh"
#include "attention/cuda/merge_rows.cuh"
#include "device/exchange.cuh"
#include "device/warpgroup.cuh"

namespace bequest::cuda {

// Where the grid is compiled to do it: heads of 256 leave no registers for it.
template <int D>
inline constexpr bool kMergesInGrid = kIsHopper && D <= kMostMergedInGrid;

template <int D>
using MergeTile = LaneState<D>[kMergeWarps][32];

// Merges an entry of at most kMergeWarps rows by kWarps warps, each with the parts of several: all of them
// are asked for at once. By the whole block.
template <int D, int kWarps>
__device__ void merge_entry(const AttentionArgs& a, const MergeEntry& entry, int head, MergeTile<D>& shared) {
  constexpr int kParts = kMergeWarps / kWarps;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int num_rows = entry.num_tokens * a.group;
  int rows[kParts], firsts[kParts];
#pragma unroll
  for (int n = 0; n < kParts; ++n) {
    const MergePart part(warp + n * kWarps, num_rows);
    const bool has_row = part.row < num_rows && part.part < part.warps_per_row;
    rows[n] = part.row;
    firsts[n] = has_row ? part.part : entry.num_states + entry.num_shared;
  }
  const int warps_per_row = MergePart(0, num_rows).warps_per_row;
  LaneState<D> totals[kParts];
  merge_states<D, kParts>(totals, a, entry, head, rows, firsts, warps_per_row, lane);
  __syncthreads();  // the last entry's states have been read
#pragma unroll
  for (int n = 0; n < kParts; ++n) shared[warp + n * kWarps][lane] = totals[n];
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kParts; ++n) {
    const int row = warp + n * kWarps;  // of part 0
    if (row >= num_rows) continue;
    for (int other = 1; other < warps_per_row; ++other) totals[n].merge(shared[row + other * num_rows][lane]);
    write_row<D>(a, entry, head, row, totals[n], lane);
  }
}

// Counts the blocks of a head.
class HeadCounter {
 public:
  __device__ HeadCounter(const AttentionArgs& a, int head) : counter_(a.merge_counters + head) {}

  // When all of the block have written their states. By one thread.
  __device__ void count() const { add_one_release(counter_); }
  // Until all blocks are counted. By one thread.
  __device__ void wait(int blocks) const {
    for (Patience patience; load_acquire(counter_) % kReader != blocks;) patience.spend();
  }
  // After that, once by each block that waits: announces that it does no more. What that returns is for
  // settle(), when there is time for it. By one thread.
  __device__ int leave() const { return atomicAdd(counter_, kReader); }
  // The last block to leave sets the counter to what the next launch expects. By the thread that left.
  __device__ void settle(int left, int blocks, int waiting) const {
    if (left == blocks + (waiting - 1) * kReader) *counter_ = 0;
  }

 private:
  int32_t* const counter_;
};

// At the end of each block of a grid (workers, NKV), when all of it have written their states. `shared`: the
// block's memory, which nobody uses any more. By the whole block. REQUIRES: num_merges > 0
template <int D, int kWarps>
__device__ void merge_in_grid(const AttentionArgs& a, int num_merges, uint8_t* shared) {
  const int head = blockIdx.y, block = blockIdx.x, blocks = gridDim.x;
  const HeadCounter counter(a, head);
  if (threadIdx.x == 0) counter.count();
  // As many blocks as have an entry, or a warp with a row of a small one.
  const int waiting = min(blocks, max(num_merges, (num_merges * a.group + kWarps - 1) / kWarps));
  if (block >= waiting) return;
  SmallEntries<kWarps> small(a, num_merges);
  MergeEntry entry = load_merge(a, min(block, num_merges - 1));
  if (threadIdx.x == 0) counter.wait(blocks);
  __syncthreads();
  const int left = threadIdx.x == 0 ? counter.leave() : 0;
  small.template merge<D>(a, head);
  auto& tile = *reinterpret_cast<MergeTile<D>*>(shared);
  for (int index = block; index < num_merges; index += blocks) {
    if (index != block) entry = load_merge(a, index);
    if (!is_small(entry)) merge_entry<D, kWarps>(a, entry, head, tile);
  }
  if (threadIdx.x == 0) counter.settle(left, blocks, waiting);
}

}  // namespace bequest::cuda
