// The draw of ops/cpu/sampling_draw.h on the device: the same noise from the same random bits, operation by
// operation, so that both backends choose the same token.
#pragma once

#include "core/philox.h"
#include "device/reductions.cuh"
#include "ops/cuda/vocab_row.cuh"

namespace bequest::cuda {

struct RowDrawKey {
  uint64_t seed;
  uint32_t position;
  uint32_t choice;
};

// log x to about 1 ulp, for normal x > 0. Explicit roundings: neither fast math nor the compiler's choice of
// fused operations may differ from the CPU's.
__device__ __forceinline__ float log_normal(float x) {
  const int bits = __float_as_int(x);
  const int e = (bits - 0x3f3504f3) >> 23;
  const float f = __fadd_rn(__int_as_float(bits - (e << 23)), -1.0f);
  float p = 7.0376836292e-2f;
  p = __fmaf_rn(p, f, -1.1514610310e-1f);
  p = __fmaf_rn(p, f, 1.1676998740e-1f);
  p = __fmaf_rn(p, f, -1.2420140846e-1f);
  p = __fmaf_rn(p, f, 1.4249322787e-1f);
  p = __fmaf_rn(p, f, -1.6668057665e-1f);
  p = __fmaf_rn(p, f, 2.0000714765e-1f);
  p = __fmaf_rn(p, f, -2.4999993993e-1f);
  p = __fmaf_rn(p, f, 3.3333331174e-1f);
  const float square = __fmul_rn(f, f);
  const auto n = static_cast<float>(e);
  float y = __fmaf_rn(__fmul_rn(p, f), square, __fmul_rn(n, -2.12194440e-4f));
  y = __fmaf_rn(square, -0.5f, y);
  return __fmaf_rn(n, 0.693359375f, __fadd_rn(f, y));
}

// In (0, 1 - 2^-24].
__device__ __forceinline__ float uniform_of(uint32_t bits) {
  return fminf(__fmaf_rn(__uint2float_rn(bits), 0x1p-32f, 0x1p-33f), 1.0f - 0x1p-24f);
}

// x / T + the Gumbel noise of w = uniform_of(bits).
__device__ __forceinline__ float noisy(float x, float inverse_temperature, float w) {
  const float u = __fadd_rn(1.0f, -w);
  const float lost =
      __fadd_rn(__fadd_rn(1.0f, -u), -w);  // what rounding took from u: all of w where it is small
  const float exponential = -__fadd_rn(log_normal(u), lost);
  return __fmaf_rn(x, inverse_temperature, -log_normal(exponential));
}

// A token's score from its own philox block.
__device__ __forceinline__ float score_of(float x, int id, float inverse_temperature, const RowDrawKey& key) {
  const PhiloxBlock random =
      philox4x32({{static_cast<uint32_t>(id) / 4, key.position, key.choice, 0}}, key.seed);
  const uint32_t low = id & 1 ? random.word[1] : random.word[0];
  const uint32_t high = id & 1 ? random.word[3] : random.word[2];
  return noisy(x, inverse_temperature, uniform_of(id & 2 ? high : low));
}

// A thread's search for the best score. Most tokens are ruled out by one comparison of their random bits:
// with b the best score so far, x / T - log(e) >= b needs e <= exp(x / T - b), and e = -log(1 - w) is never
// below w.
class Draw {
 public:
  __device__ Draw(ClusterShared& shared, float inverse_temperature, const RowDrawKey& key)
      : shared_(shared), inverse_temperature_(inverse_temperature), key_(key) {}

  // Before the first offer, by all threads of the CTA.
  __device__ void start() {
    if (threadIdx.x == 0) shared_.best_score = ordered(-INFINITY);
    __syncthreads();
  }

  // Tokens first + [0, kUnit). REQUIRES: first is a multiple of kUnit.
  __device__ __forceinline__ void offer(const float (&x)[kUnit], int first, const RowCutoff& cutoff) {
    float most = -INFINITY;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) most = fmaxf(most, x[i]);
    const float bound = fmaxf(score_, from_ordered(*static_cast<volatile uint32_t*>(&shared_.best_score)));
    constexpr float kMostNoise = 23.0f;  // no noise exceeds -log(2^-33)
    if (!(most >= cutoff.value) ||
        !(__fmaf_rn(most, inverse_temperature_, -bound) + margin(bound) + kMostNoise >= 0))
      return;
    // No token of the unit with more random bits than this can win. The conversion saturates.
    const float limit = __expf(__fmaf_rn(most, inverse_temperature_, -bound) + margin(bound));
    const uint32_t most_bits = __float2uint_ru(limit * 0x1p32f);
#pragma unroll
    for (int half = 0; half < kUnit / 4; ++half) {
      const PhiloxBlock random =
          philox4x32({{static_cast<uint32_t>(first / 4 + half), key_.position, key_.choice, 0}}, key_.seed);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float value = x[4 * half + i];
        const int id = first + 4 * half + i;
        if (random.word[i] > most_bits || !cutoff.keeps(value, id)) continue;
        const float score = noisy(value, inverse_temperature_, uniform_of(random.word[i]));
        if (score > score_) {  // ids of a thread ascend: the first of equals stays
          score_ = score;
          id_ = id;
        }
      }
    }
  }

  // Lets the other warps of the CTA know. REQUIRES: whole warps.
  __device__ __forceinline__ void publish() {
    const uint32_t best = __reduce_max_sync(kAllLanes, ordered(score_));
    if (threadIdx.x % kWarp == 0 && best > shared_.best_score) atomicMax(&shared_.best_score, best);
  }

  __device__ uint64_t best() const { return ranked(score_, id_); }

 private:
  // Covers the rounding of a score, which grows with it. Infinite before the first score.
  static __device__ __forceinline__ float margin(float bound) { return 1e-3f + fabsf(bound) * 0x1p-21f; }

  ClusterShared& shared_;
  const float inverse_temperature_;
  const RowDrawKey key_;
  float score_ = -INFINITY;
  int id_ = INT_MAX;
};

}  // namespace bequest::cuda
