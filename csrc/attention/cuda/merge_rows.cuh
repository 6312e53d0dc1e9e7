// How partial softmax states become rows: the arithmetic that the merge kernel (merge.cu) and the end of the
// decode kernel (merge_in_grid.cuh) share, so that it does not matter to one bit who merges.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "attention/cuda/device_args.cuh"
#include "device/reductions.cuh"

namespace bequest::cuda {

inline constexpr int kMergeWarps = 16;     // that share the rows of an entry
inline constexpr int kMergeUnroll = 4;     // states a warp has in flight for a row
inline constexpr int kMergeFewStates = 8;  // that one warp merges about as soon as several would

// A lane's columns of a state: lane * 2 + 64 * i + {0, 1}.
template <int D>
struct LaneState {
  static constexpr int kPairs = D / 64;
  float2 o[kPairs] = {};
  float m = -INFINITY;
  float d = 0.0f;

  // From the L2: another multiprocessor may have written it just now.
  __device__ void load(const AttentionArgs& a, int64_t state, int lane) {
    const float2 scales = __ldcg(a.state_scales + state);
    m = scales.x;
    d = scales.y;
    const auto* values = reinterpret_cast<const float2*>(a.state_values + state * D) + lane;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) o[i] = __ldcg(values + 32 * i);
  }

  __device__ void merge(const LaneState& other) {
    const float highest = fmaxf(m, other.m);
    const float own = exp2f(m - finite_or_zero(highest));
    const float theirs = exp2f(other.m - finite_or_zero(highest));
    m = highest;
    d = d * own + other.d * theirs;
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      o[i] = {o[i].x * own + other.o[i].x * theirs, o[i].y * own + other.o[i].y * theirs};
  }
};

// What a warp of kMergeWarps has of an entry with fewer rows than that: every warps_per_row-th state of a
// row, from state `part` on.
struct MergePart {
  int row;
  int part;
  int warps_per_row;

  __device__ MergePart(int warp, int rows)
      : row(rows >= kMergeWarps ? warp : warp % rows),
        part(rows >= kMergeWarps ? 0 : warp / rows),
        warps_per_row(rows >= kMergeWarps ? 1 : kMergeWarps / rows) {}
};

// The states first, first + step, ... of N rows, each with a `first` of its own; none of them all where
// `first` is past the last.
template <int D, int N>
__device__ void merge_states(LaneState<D> (&totals)[N], const AttentionArgs& a, const MergeEntry& entry,
                             int head, const int (&rows)[N], const int (&firsts)[N], int step, int lane) {
  const int entry_rows = entry.num_tokens * a.group;
  const int num_states = entry.num_states + entry.num_shared;
  for (int done = 0; done < num_states; done += step * kMergeUnroll) {
    LaneState<D> states[N][kMergeUnroll];
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int u = 0; u < kMergeUnroll; ++u) {
        const int index = firsts[n] + done + u * step;
        if (index >= num_states) break;
        const int shared = index - entry.num_states;
        const int first_row = shared < 0 ? entry.state_row + index * entry_rows
                                         : entry.shared_row + shared * entry.shared_stride;
        states[n][u].load(a, static_cast<int64_t>(first_row + rows[n]) * a.num_kv_heads + head, lane);
      }
#pragma unroll
    for (int n = 0; n < N; ++n)
      if (firsts[n] + done < num_states)
#pragma unroll
        for (int u = 0; u < kMergeUnroll; ++u) totals[n].merge(states[n][u]);
  }
}

template <int D>
__device__ LaneState<D> merge_row(const AttentionArgs& a, const MergeEntry& entry, int head, int row,
                                  int first, int step, int lane) {
  LaneState<D> total[1];
  merge_states<D, 1>(total, a, entry, head, {row}, {first}, step, lane);
  return total[0];
}

template <int D>
__device__ void write_row(const AttentionArgs& a, const MergeEntry& entry, int head, int row,
                          const LaneState<D>& state, int lane) {
  const float inverse = state.d > 0.0f ? 1.0f / state.d : 0.0f;
  const int64_t token = entry.first_token + row / a.group;
  auto* out =
      reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(a.out) +
                                        (token * a.num_q_heads + head * a.group + row % a.group) * D) +
      lane;
#pragma unroll
  for (int i = 0; i < LaneState<D>::kPairs; ++i)
    out[32 * i] = __floats2bfloat162_rn(state.o[i].x * inverse, state.o[i].y * inverse);
}

__device__ inline MergeEntry load_merge(const AttentionArgs& a, int index) {
  const int4 own = __ldg(a.merges + 2 * index);
  const int4 shared = __ldg(a.merges + 2 * index + 1);
  return {own.x, own.y, own.z, own.w, shared.x, shared.y, shared.z, shared.w};
}

// Whether a single warp merges each of its rows.
__device__ inline bool is_small(const MergeEntry& entry) {
  return entry.num_tokens == 1 && entry.num_states + entry.num_shared <= kMergeFewStates;
}

// The small entries, a warp per row, dealt to the warps of all blocks of a head: the first entry of a warp is
// known before states are.
template <int kWarps>
class SmallEntries {
 public:
  __device__ SmallEntries(const AttentionArgs& a, int num_merges)
      : count_(num_merges * a.group),
        index_(static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32) {
    if (index_ < count_) entry_ = load_merge(a, index_ / a.group);
  }

  template <int D>
  __device__ void merge(const AttentionArgs& a, int head) {
    const int lane = threadIdx.x % 32;
    while (index_ < count_) {
      const int row = index_ % a.group;
      if (is_small(entry_))
        write_row<D>(a, entry_, head, row, merge_row<D>(a, entry_, head, row, 0, 1, lane), lane);
      index_ += static_cast<int>(gridDim.x) * kWarps;
      if (index_ < count_) entry_ = load_merge(a, index_ / a.group);
    }
  }

 private:
  const int count_;
  int index_;
  MergeEntry entry_{};
};

}  // namespace bequest::cuda
