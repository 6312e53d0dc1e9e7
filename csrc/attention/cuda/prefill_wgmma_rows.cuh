// A multiplying warpgroup's 64 rows of a tile: softmax state and accumulators (prefill_wgmma.cuh).
//
// A lane holds rows lane / 4 + {0, 8} ("halves") of its warp's 16, in the layout of warpgroup.cuh's
// accumulators.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "attention/cuda/device_args.cuh"
#include "attention/cuda/kv_formats.cuh"
#include "attention/cuda/prefill_wgmma_tasks.cuh"
#include "device/pairs.cuh"
#include "device/reductions.cuh"
#include "device/tensor_core.cuh"
#include "device/warpgroup.cuh"

namespace bequest::cuda {

__device__ __forceinline__ int multiplier_row(int multiplier) {
  return multiplier * kMultiplierRows + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
}

// Softmax of an item's rows.
template <Scores kScores>
class RowSoftmax {
 public:
  __device__ __forceinline__ RowSoftmax(const AttentionArgs& a, const WorkItem& item, int multiplier,
                                        const GroupDivider& divider) {
    const int first_token = min(divider.token(multiplier * kMultiplierRows), item.num_tokens - 1);
    all_begin_ = max(item.kv_begin, item.first_position + item.num_tokens - a.window);
    all_end_ = min(item.kv_end, item.first_position + first_token + 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = min(divider.token(multiplier_row(multiplier) + half * 8), item.num_tokens - 1);
      const int position = item.first_position + token;
      key_begin_[half] = max(position - a.window + 1, item.kv_begin);
      key_end_[half] = min(position + 1, item.kv_end);
      m_[half] = -INFINITY;
      d_[half] = 0.0f;
    }
  }

  template <int kCount>
  __device__ __forceinline__ static void cap(const AttentionArgs& a, float (&scores)[kCount]) {
    if constexpr (kScores == Scores::kSoftCap)
#pragma unroll
      for (int i = 0; i < kCount; ++i) scores[i] = score_in_log2<kScores>(scores[i], a);
  }

  // Scores of keys a row does not see become -inf. `key`: the tile's first.
  template <int kCount>
  __device__ __forceinline__ void mask(float (&scores)[kCount], int key) const {
    if (key >= all_begin_ && key + kCount * 2 <= all_end_) return;
    // Relative to the lane's first key, so that each comparison is with a constant.
    const int origin = key + threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int begin = key_begin_[half] - origin, end = key_end_[half] - origin;
#pragma unroll
      for (int n = 0; n < kCount / 4; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (n * 8 + e >= end || n * 8 + e < begin) scores[n * 4 + half * 2 + e] = -INFINITY;
    }
  }

  // scores → softmax weights relative to m. Moves m where a row's scores exceed it by too much: what was
  // accumulated has then to be multiplied with shrink().
  template <int kCount>
  __device__ __forceinline__ void weigh(const AttentionArgs& a, float (&scores)[kCount]) {
    const float factor = kScores == Scores::kPlain ? a.score_factor : 1.0f;
    move_reference(scores, factor);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float m = finite_or_zero(m_[half]);
#pragma unroll
      for (int n = 0; n < kCount / 4; ++n)
#pragma unroll
        for (int i = n * 4 + half * 2; i < n * 4 + half * 2 + 2; ++i) {
          scores[i] = exp2f(fmaf(scores[i], factor, -m));
          d_[half] += scores[i];
        }
    }
  }

  __device__ __forceinline__ bool has_moved() const { return has_moved_; }
  __device__ __forceinline__ float shrink(int half) const { return shrink_[half]; }
  __device__ __forceinline__ float m(int half) const { return m_[half]; }
  __device__ __forceinline__ float d(int half) const { return quad_sum(d_[half]); }

 private:
  // Without a branch: the compiler would end products under way at one.
  template <int kCount>
  __device__ __forceinline__ void move_reference(const float (&scores)[kCount], float factor) {
    bool grows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top[2] = {scores[half * 2], scores[half * 2 + 1]};
#pragma unroll
      for (int n = 1; n < kCount / 4; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) top[e] = fmaxf(top[e], scores[n * 4 + half * 2 + e]);
      const float highest = quad_max(fmaxf(top[0], top[1])) * factor;
      // A row that does not need it stays: its result does not depend on its neighbours.
      grows[half] = highest > m_[half] + kRescaleThreshold;
      const float m = grows[half] ? highest : m_[half];
      shrink_[half] = exp2f(m_[half] - finite_or_zero(m));
      m_[half] = m;
      d_[half] *= shrink_[half];
    }
    has_moved_ = __any_sync(kAllLanes, grows[0] || grows[1]);
  }

  int key_begin_[2], key_end_[2];  // what a row sees
  int all_begin_, all_end_;        // what all rows see
  float m_[2], d_[2];
  float shrink_[2];
  bool has_moved_ = false;
};

// The accumulators o[64, D] and the weights they are made of.
template <int D, class Cache>
class RowAccumulator {
 public:
  using B = PrefillBuffers<D>;
  using Operands = typename Cache::Operands;

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < D / 2; ++i) o_[i] = 0.0f;
  }

  // Issues scores[64, kCount * 2] = queries · keysᵀ.
  template <int kCount>
  __device__ __forceinline__ static void multiply_keys(float (&scores)[kCount], uint32_t queries,
                                                       uint32_t keys) {
    const uint64_t q = operand(queries, kSwizzleBytes), k = operand(keys, kSwizzleBytes);
#pragma unroll
    for (int i = 0; i < D / 16; ++i)
      multiply<Operands>(scores, advance(q, i / 4 * B::kQueryPanelBytes + i % 4 * 32),
                         advance(k, i / 4 * B::kTilePanelBytes + i % 4 * 32), i > 0);
  }

  // The same with the queries in registers.
  template <int kCount>
  __device__ __forceinline__ static void multiply_keys(float (&scores)[kCount],
                                                       const uint32_t (&queries)[D / 16][4], uint32_t keys) {
    const uint64_t k = operand(keys, kSwizzleBytes);
#pragma unroll
    for (int i = 0; i < D / 16; ++i)
      multiply_rows<Operands>(scores, queries[i], advance(k, i / 4 * B::kTilePanelBytes + i % 4 * 32), i > 0);
  }

  // Issues o += weights · values, of the tile's first kKeys keys.
  template <int kKeys>
  __device__ __forceinline__ void multiply_values(uint32_t values) {
    const uint64_t v = operand(values, kSwizzleBytes, B::kTilePanelBytes);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i)
      multiply_transposed<Operands>(o_, weights_ + 4 * i, advance(v, i * 16 * kPanelRowBytes), true);
  }

  // Until no product is under way.
  __device__ __forceinline__ void wait_products() { cuda::wait_products<0>(o_); }

  // Takes a tile's weights over. At rest.
  template <Scores kScores, int kCount>
  __device__ __forceinline__ void take(const RowSoftmax<kScores>& softmax, const float (&weights)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i)
      weights_[i] = Cache::pack_weights(weights[2 * i], weights[2 * i + 1]);
    if (softmax.has_moved())
#pragma unroll
      for (int i = 0; i < D / 2; ++i) o_[i] *= softmax.shrink(i / 2 % 2);
  }

  // Writes an item's rows, whose scales are {m, d}, to the output or to its partial state. At rest.
  __device__ __forceinline__ void store(const AttentionArgs& a, const PrefillTask& task, int multiplier,
                                        const GroupDivider& divider, const float2 (&scales)[2]) const {
    const int rows = task.item.num_tokens * a.group;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = multiplier_row(multiplier) + half * 8;
      if (task.item.result.is_state())
        store_state(a, task, row, rows, half, scales[half]);
      else
        store_output(a, task, divider, row, rows, half, scales[half]);
    }
  }

  // Writes the warp's rows of the output to the panels at `panels`, as queries lie there.
  __device__ __forceinline__ void store_panels(const AttentionArgs& a, const PrefillTask& task,
                                               int multiplier, const GroupDivider& divider,
                                               const float2 (&scales)[2], uint32_t panels) const {
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head = task.kv_head() * a.group + divider.head(multiplier_row(multiplier) + half * 8);
      inverse[half] = output_factor(a, head, scales[half].x, scales[half].y);
      if constexpr (kScales) inverse[half] *= a.value_scale;
    }
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16, right = threadIdx.x % 32 / 16;
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      uint32_t pairs[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = i * 8 + j * 2;
        pairs[j] = pack(o_[at] * inverse[j % 2], o_[at + 1] * inverse[j % 2]);
      }
      store_matrices(panels + i / 4 * B::kQueryPanelBytes + panel_offset(row, i % 4 * 2 + right), pairs);
    }
  }

 private:
  static constexpr bool kScales = !std::is_same_v<Cache, Bf16Cache>;  // values have a scale

  __device__ __forceinline__ void store_state(const AttentionArgs& a, const PrefillTask& task, int row,
                                              int rows, int half, float2 scales) const {
    if (row >= rows) return;
    const int64_t state =
        static_cast<int64_t>(task.item.result.state_row() + row) * a.num_kv_heads + task.kv_head();
    if (threadIdx.x % 4 == 0) a.state_scales[state] = scales;
    float* values = a.state_values + state * D + threadIdx.x % 4 * 2;
    const float scale = kScales ? a.value_scale : 1.0f;
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
      *reinterpret_cast<float2*>(values + n * 8) = {o_[n * 4 + half * 2] * scale,
                                                    o_[n * 4 + half * 2 + 1] * scale};
  }

  __device__ __forceinline__ void store_output(const AttentionArgs& a, const PrefillTask& task,
                                               const GroupDivider& divider, int row, int rows, int half,
                                               float2 scales) const {
    const int head = task.kv_head() * a.group + divider.head(row);
    float inverse = output_factor(a, head, scales.x, scales.y);
    if constexpr (kScales) inverse *= a.value_scale;
    const int64_t token = task.item.first_token + divider.token(row);
    bf16* out = static_cast<bf16*>(a.out) + (token * a.num_q_heads + head) * D + threadIdx.x % 4 * 8;
#pragma unroll
    for (int n = 0; n < D / 8; n += 4) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = (n + i) * 4 + half * 2;
        pairs[i] = pack(o_[at] * inverse, o_[at + 1] * inverse);
      }
      transpose_quad(pairs);  // a lane then has 8 columns side by side
      if (row < rows) *reinterpret_cast<uint4*>(out + n * 8) = {pairs[0], pairs[1], pairs[2], pairs[3]};
    }
  }

  // Lane q of four gets value q of lane i as its value i.
  __device__ __forceinline__ static void transpose_quad(uint32_t (&x)[4]) {
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
      const bool upper = threadIdx.x & distance;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i & distance) continue;
        const uint32_t received = __shfl_xor_sync(kAllLanes, upper ? x[i] : x[i + distance], distance);
        if (upper)
          x[i] = received;
        else
          x[i + distance] = received;
      }
    }
  }

  float o_[D / 2];
  uint32_t weights_[kTileKeys / 4];
};

}  // namespace bequest::cuda
