// Merges the partial softmax states of the tiles that the work list cut, or whose first keys are shared, and
// writes their rows.
//
// A thread block takes one merge entry and kv head. With few rows and many states (decode), several warps
// share a row, each with every n-th state, and meet in shared memory; with many rows (prefill) a warp takes
// whole rows. Single tokens with few states, of which a step of many sharers has thousands, are dealt out to
// warps beforehand.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "attention/cuda/device_args.cuh"
#include "attention/cuda/merge_states.cuh"
#include "device/launch.cuh"
#include "device/reductions.cuh"

namespace bequest::cuda {
namespace {

constexpr int kWarps = kMergeWarps;
constexpr int kBatch = 4;  // states that a warp has in flight

// A lane's columns of a state: lane * 2 + 64 * i + {0, 1}.
template <int D>
using LaneState = PartialState<D / 32>;

// The states part, part + parts, ... of a row.
template <int D>
__device__ LaneState<D> merge_row(const AttentionArgs& a, const MergeEntry& entry, int row, int part,
                                  int parts, int lane) {
  const auto load = [&](int64_t state, float (&o)[D / 32]) {
    const auto* values = reinterpret_cast<const float2*>(a.state_values + state * D) + lane;
#pragma unroll
    for (int i = 0; i < D / 64; ++i) {
      const float2 pair = values[32 * i];
      o[2 * i] = pair.x;
      o[2 * i + 1] = pair.y;
    }
  };
  return merge_part<D / 32, kBatch>(a, entry, row, static_cast<int>(blockIdx.y), part, parts, load);
}

template <int D>
__device__ void write_row(const AttentionArgs& a, const MergeEntry& entry, int row, const LaneState<D>& state,
                          int lane) {
  const int head = static_cast<int>(blockIdx.y) * a.group + row % a.group;
  const float inverse = output_factor(a, head, state.m, state.d);
  const int64_t token = entry.first_token + row / a.group;
  auto* out = reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(a.out) +
                                                (token * a.num_q_heads + head) * D) +
              lane;
#pragma unroll
  for (int i = 0; i < D / 64; ++i)
    out[32 * i] = __floats2bfloat162_rn(state.o[2 * i] * inverse, state.o[2 * i + 1] * inverse);
}

// Merges the rows [first, first + kWarps) of an entry, or all of fewer. By the whole block.
template <int D>
__device__ void merge_rows(const AttentionArgs& a, const MergeEntry& entry, int first,
                           LaneState<D> (&shared)[kWarps][32]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rows = entry.num_tokens * a.group;
  const int warps_per_row = parts_of_row(entry, a.group);
  const int row = first + (warps_per_row == 1 ? warp : warp % rows);
  const int part = warps_per_row == 1 ? 0 : warp / rows;
  const bool has_row = row < rows && part < warps_per_row;
  LaneState<D> total;
  if (has_row) total = merge_row<D>(a, entry, row, part, warps_per_row, lane);
  if (warps_per_row > 1) {
    __syncthreads();  // the last entry's states have been read
    shared[warp][lane] = total;
    __syncthreads();
    if (part == 0)
      for (int other = 1; other < warps_per_row; ++other) total.merge(shared[warp + other * rows][lane]);
  }
  if (has_row && part == 0) write_row<D>(a, entry, row, total, lane);
}

// The small entries, a warp per row: the first entry of a warp is known before states are.
class SmallEntries {
 public:
  __device__ explicit SmallEntries(const AttentionArgs& a)
      : count_(__ldg(a.work_list) * a.group),
        index_(static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32) {
    if (index_ < count_) entry_ = load_entry(a.merges, index_ / a.group);
  }

  template <int D>
  __device__ void merge(const AttentionArgs& a) {
    const int lane = threadIdx.x % 32;
    while (index_ < count_) {
      const int row = index_ % a.group;
      if (is_small(entry_)) write_row<D>(a, entry_, row, merge_row<D>(a, entry_, row, 0, 1, lane), lane);
      index_ += static_cast<int>(gridDim.x) * kWarps;
      if (index_ < count_) entry_ = load_entry(a.merges, index_ / a.group);
    }
  }

 private:
  const int count_;
  int index_;
  MergeEntry entry_{};
};

template <int D>
__global__ void __launch_bounds__(kWarps * 32) merge_kernel(const __grid_constant__ AttentionArgs a) {
  __shared__ LaneState<D> shared[kWarps][32];
  __shared__ MergeEntry first_entry;  // read before states are there, like those of the warps
  // The product that follows may ask for its weights meanwhile.
  let_next_start();
  const int num_merges = __ldg(a.work_list);
  SmallEntries small(a);
  if (threadIdx.x == 0 && static_cast<int>(blockIdx.x) < num_merges)
    first_entry = load_entry(a.merges, blockIdx.x);
  // Even a block without work waits: the grid must not end before the one whose states it merges.
  wait_for_previous();
  small.merge<D>(a);
  __syncthreads();
  for (int index = blockIdx.x; index < num_merges; index += gridDim.x) {
    const MergeEntry entry =
        index == static_cast<int>(blockIdx.x) ? first_entry : load_entry(a.merges, index);
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
    case kBroadHead:
      return launch_dim<kBroadHead>(a, blocks_per_head, stream);
  }
  fail("bf16 attention: head_dim must be 64, 128, 256 or 512");
}

}  // namespace bequest::cuda
