// What kernels that merge partial softmax states share: in which order a row's states are added up, so that
// all of them come to the same bits.
#pragma once

#include <cuda_runtime.h>

#include "attention/cuda/device_args.cuh"

namespace bequest::cuda {

inline constexpr int kMergeWarps = 16;
inline constexpr int kFewStates = 8;  // that one warp merges about as soon as several would

// Some columns of a state.
template <int N>
struct PartialState {
  float o[N] = {};
  float m = -INFINITY;
  float d = 0.0f;

  __device__ void merge(const PartialState& other) {
    const float highest = fmaxf(m, other.m);
    const float own = exp2f(m - finite_or_zero(highest));
    const float theirs = exp2f(other.m - finite_or_zero(highest));
    m = highest;
    d = d * own + other.d * theirs;
#pragma unroll
    for (int i = 0; i < N; ++i) o[i] = o[i] * own + other.o[i] * theirs;
  }
};

__device__ inline MergeEntry load_entry(const int4* merges, int index) {
  const int4 own = __ldg(merges + 2 * index);
  const int4 shared = __ldg(merges + 2 * index + 1);
  return {own.x, own.y, own.z, own.w, shared.x, shared.y, shared.z, shared.w};
}

// Whether a warp merges each of its rows.
__device__ inline bool is_small(const MergeEntry& entry) {
  return entry.num_tokens == 1 && entry.num_states + entry.num_shared <= kFewStates;
}

// Parts that a row's states are dealt to in turns; these are merged in their order.
__device__ inline int parts_of_row(const MergeEntry& entry, int group) {
  const int rows = entry.num_tokens * group;
  return is_small(entry) || rows >= kMergeWarps ? 1 : kMergeWarps / rows;
}

// The states part, part + parts, ... of a row, kBatch of them in flight. load(state, values) reads some
// columns, N of them.
template <int N, int kBatch, class Load>
__device__ PartialState<N> merge_part(const AttentionArgs& a, const MergeEntry& entry, int row, int kv_head,
                                      int part, int parts, Load&& load) {
  const int rows = entry.num_tokens * a.group;
  const int num_states = entry.num_states + entry.num_shared;
  PartialState<N> total;
  for (int i = part; i < num_states; i += parts * kBatch) {
    PartialState<N> states[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int index = i + u * parts;
      if (index >= num_states) break;
      const int shared = index - entry.num_states;
      const int first_row =
          shared < 0 ? entry.state_row + index * rows : entry.shared_row + shared * entry.shared_stride;
      const int64_t state = static_cast<int64_t>(first_row + row) * a.num_kv_heads + kv_head;
      const float2 scales = a.state_scales[state];
      states[u].m = scales.x;
      states[u].d = scales.y;
      load(state, states[u].o);
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) total.merge(states[u]);
  }
  return total;
}

}  // namespace bequest::cuda
