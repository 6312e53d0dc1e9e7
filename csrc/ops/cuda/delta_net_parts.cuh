// Parts of the gated delta rule for heads of 128 keys and 128 values behind a convolution of four tokens:
// what the kernel of one token and those of many have in common. Each sum is made in the same order in all of
// them, so a token's bits do not depend on which kernel it passes.
#pragma once

#include "device/reductions.cuh"
#include "device/vectors.cuh"
#include "ops/cuda/activation.cuh"
#include "ops/cuda/delta_net.h"

namespace bequest::cuda::delta {

inline constexpr int kDim = 128;   // of keys, and of values
inline constexpr int kWidth = 4;   // tokens that the convolution sees
inline constexpr int kQuad = 4;    // channels, or columns of S, that follow each other: one access
inline constexpr int kLanes = 32;  // that have the channels of a head
inline constexpr int kParts = 8;   // of the keys of a column
inline constexpr int kRounds = kDim / (kParts * kQuad);
static_assert(kLanes * kQuad == kDim && kLanes == kWarp);

// Part p has of each 32 keys the four from 4 p on: parts that are read at once lie side by side.
__device__ __forceinline__ int key_of(int part, int round) { return (round * kParts + part) * kQuad; }

__device__ __forceinline__ float silu(float x) { return activate<Activation::kSilu>(x); }

// What a sequence's first token of the step comes behind.
struct Past {
  int64_t begin;        // that token
  const float* inputs;  // [kWidth - 1, C], the last ones of the convolution; null: it is the first of all

  __device__ static Past of(const DeltaNetParams& p, int64_t sequence) {
    const int64_t start = p.starts[sequence];
    return {p.query_start[sequence],
            start < 0 ? nullptr : p.states + start * p.slot_stride + p.sizes.matrix_floats()};
  }
};

// The inputs of four channels, from `channel` on, the token's own last.
struct Window {
  float of[kWidth][kQuad];

  // What the step before has left of it, for the token that comes `ahead` tokens behind the first of the
  // step.
  __device__ __forceinline__ void load_past(const Past& past, int64_t ahead, int64_t channels,
                                            int64_t channel) {
#pragma unroll
    for (int i = 0; i < kWidth - 1; ++i) {
      const int64_t at = i + ahead;
      if (at >= kWidth - 1) continue;
      if (past.inputs == nullptr) {
#pragma unroll
        for (float& x : of[i]) x = 0.0f;
      } else {
        load_vector<float, kQuad>(past.inputs + at * channels + channel, of[i]);
      }
    }
  }

  // What of it is in the step. row: of the token itself
  template <class T>
  __device__ __forceinline__ void load_rows(const T* row, int64_t ahead, int64_t row_size, int64_t channel) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const int back = kWidth - 1 - i;
      if (back <= ahead) load_vector<T, kQuad>(row - back * row_size + channel, of[i]);
    }
  }

  __device__ __forceinline__ void convolve(const float (&taps)[kWidth][kQuad], float (&y)[kQuad]) const {
#pragma unroll
    for (int c = 0; c < kQuad; ++c) {
      float sum = 0.0f;
#pragma unroll
      for (int i = kWidth - 1; i >= 0; --i) sum = fmaf(of[i][c], taps[i][c], sum);
      y[c] = silu(sum);
    }
  }

  // What the next token will need of it.
  __device__ __forceinline__ void keep(const DeltaNetParams& p, int64_t slot, int64_t channel) const {
    float* const to = p.states + slot * p.slot_stride + p.sizes.matrix_floats() + channel;
#pragma unroll
    for (int i = 0; i < kWidth - 1; ++i)
      store_vector<float, kQuad>(to + i * p.sizes.conv_channels(), of[i + 1]);
  }
};

__device__ __forceinline__ void load_taps(const DeltaNetParams& p, int64_t channel,
                                          float (&taps)[kWidth][kQuad]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i)
    load_constant<float, kQuad>(p.taps + i * p.sizes.conv_channels() + channel, taps[i]);
}

__device__ __forceinline__ float sum_of_squares(const float (&x)[kQuad]) {
  float square = 0.0f;
#pragma unroll
  for (const float each : x) square = fmaf(each, each, square);
  return warp_sum(square);
}

// A query or a key, which lies in the lanes of a warp, to this length.
__device__ __forceinline__ void scale_to(float length, float (&x)[kQuad]) {
  const float scale = rsqrtf(sum_of_squares(x) + kSmallestSquare) * length;
#pragma unroll
  for (float& each : x) each *= scale;
}

inline constexpr float kQueryLength = 0.088388348f;  // 1 / √kDim

struct Gates {
  float decay, rate;

  // a, b: of a token's row; decay, step_bias: of the head
  __device__ static Gates of(float a, float b, float decay, float step_bias) {
    const float x = a + step_bias, softplus = x > 20.0f ? x : log1pf(__expf(x));
    return {__expf(decay * softplus), 1.0f / (1.0f + __expf(-b))};
  }
};

// Where a row has its b of the first head; the a follow them.
__device__ __forceinline__ int64_t gates_at(const DeltaNetSizes& n) {
  return n.conv_channels() + n.value_size();
}

// What a column of S gets for each unit of its key. remembered: the column times the key
__device__ __forceinline__ float change_of(const Gates& gates, float value, float remembered) {
  return fmaf(-gates.decay, remembered, value) * gates.rate;
}

// The results of a head, which lie in the lanes of a warp: normed, and gated by z.
__device__ __forceinline__ void finish(const float (&weight)[kQuad], const float (&z)[kQuad], float eps,
                                       float (&o)[kQuad]) {
  const float scale = rsqrtf(fmaf(sum_of_squares(o), 1.0f / kDim, eps));
#pragma unroll
  for (int c = 0; c < kQuad; ++c) o[c] = weight[c] * (o[c] * scale) * silu(z[c]);
}

}  // namespace bequest::cuda::delta
