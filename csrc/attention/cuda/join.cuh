// The states of a shared tile joined to that of a tail (work_list.h), by whoever attends to the tail.
//
// The pieces of a wide tile are attended to in the same grid. It cannot hang: only tails wait, and only for
// wide tiles, which wait for nobody; there are no more thread blocks than the chip has room for at once;
// whatever else holds that room ends without them, and grids behind this one are let in when all of its
// blocks have begun. Should that ever be untrue, waiting ends in a trap.
#pragma once

#include <cuda_runtime.h>

#include "attention/cuda/device_args.cuh"
#include "device/exchange.cuh"
#include "device/launch.cuh"
#include "device/pairs.cuh"

namespace bequest::cuda {

inline constexpr int kReader = 1 << 16;  // what a reader adds to a counter, above the pieces

// The counter of the wide tile that this item is a piece of; null: nobody waits for it.
__device__ inline int32_t* counter_of_piece(const AttentionArgs& a, const WorkItem& item, int head) {
  if (a.far_position != 0 || !is_counted(item.first_position)) return nullptr;
  return a.counters + counter_of_position(item.first_position) * a.num_kv_heads + head;
}

// Says that the item's states are there. By the whole block, after it has written them.
__device__ inline void count_piece(const AttentionArgs& a, const WorkItem& item, int head) {
  int32_t* const counter = counter_of_piece(a, item, head);
  if (counter == nullptr) return;
  __syncthreads();
  if (threadIdx.x == 0) add_one_release(counter);
}

// Four columns of a row: {o, m, d}.
struct RowVector {
  float4 o{};
  float m = -INFINITY;
  float d = 0.0f;
};

// What an item joins to its own state, if it does.
class Join {
 public:
  __device__ Join(const AttentionArgs& a, const WorkItem& item) {
    if (item.result.is_joined()) entry_ = load_join(a, item.result.join_entry());
  }

  __device__ explicit operator bool() const { return entry_.num_states > 0; }

  // Until the states are there. By a warp.
  __device__ void wait(const AttentionArgs& a, int head) const {
    if (!entry_.counter.exists()) return wait_for_previous();
    if (threadIdx.x % 32 == 0) {
      const int32_t* const counter = counter_of(a, head);
      Patience patience;
      while (load_acquire(counter) % kReader < entry_.num_states) patience.spend();
    }
    __syncwarp();
  }

  // When the item waits for them no more. By one thread. The last reader leaves the counter as the next
  // launch expects it.
  __device__ void leave(const AttentionArgs& a, int head) const {
    if (!entry_.counter.exists()) return;
    int32_t* const counter = counter_of(a, head);
    if (atomicAdd(counter, kReader) == entry_.num_states + (entry_.num_readers - 1) * kReader) *counter = 0;
  }

  // Joins the states to N vectors, the i-th of row rows[i] and columns [columns[i], columns[i] + 4). In the
  // order of the states, whoever was first.
  template <int D, int N, int kBatch = 12>  // states in flight, of each vector
  __device__ void add_to(RowVector (&vectors)[N], const AttentionArgs& a, int head, const int (&rows)[N],
                         const int (&columns)[N]) const {
    const int64_t step = static_cast<int64_t>(entry_.stride) * a.num_kv_heads;
    const float2* scales_at[N];
    const float* values_at[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int64_t state = static_cast<int64_t>(entry_.state_row + rows[i]) * a.num_kv_heads + head;
      scales_at[i] = a.state_scales + state;
      values_at[i] = a.state_values + state * D + columns[i];
    }
    for (int left = entry_.num_states; left > 0; left -= kBatch) {
      float4 o[N][kBatch] = {};
      float2 scales[N][kBatch];
#pragma unroll
      for (int s = 0; s < kBatch; ++s)
#pragma unroll
        for (int i = 0; i < N; ++i) {
          scales[i][s] = {-INFINITY, 0.0f};
          if (s < left) {
            scales[i][s] = __ldcg(scales_at[i]);
            o[i][s] = __ldcg(reinterpret_cast<const float4*>(values_at[i]));
            scales_at[i] += step;
            values_at[i] += step * D;
          }
        }
#pragma unroll
      for (int i = 0; i < N; ++i) add_batch<kBatch>(vectors[i], o[i], scales[i]);
    }
  }

 private:
  __device__ int32_t* counter_of(const AttentionArgs& a, int head) const {
    return a.counters + entry_.counter.get() * a.num_kv_heads + head;
  }

  template <int kBatch>
  __device__ static void add_batch(RowVector& v, const float4 (&o)[kBatch], const float2 (&scales)[kBatch]) {
    float highest = v.m;
#pragma unroll
    for (const float2& scale : scales) highest = fmaxf(highest, scale.x);
    const float own = exp2f(v.m - finite_or_zero(highest));
    v = {{v.o.x * own, v.o.y * own, v.o.z * own, v.o.w * own}, highest, v.d * own};
#pragma unroll
    for (int s = 0; s < kBatch; ++s) {
      const float factor = exp2f(scales[s].x - finite_or_zero(highest));
      v.o = {v.o.x + o[s].x * factor, v.o.y + o[s].y * factor, v.o.z + o[s].z * factor,
             v.o.w + o[s].w * factor};
      v.d += scales[s].y * factor;
    }
  }

  JoinEntry entry_{};
};

// Four columns of the output.
__device__ inline void write_vector(const AttentionArgs& a, int64_t token, int q_head, int column,
                                    const RowVector& v) {
  const float factor = output_factor(a, q_head, v.m, v.d);
  bf16* const out = static_cast<bf16*>(a.out) + (token * a.num_q_heads + q_head) * a.head_dim + column;
  *reinterpret_cast<uint2*>(out) = {pack(v.o.x * factor, v.o.y * factor),
                                    pack(v.o.z * factor, v.o.w * factor)};
}

}  // namespace bequest::cuda
