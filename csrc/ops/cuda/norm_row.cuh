// A row on its way through a norm's kernel: N vectors of W elements per thread, in registers.
#pragma once

#include "device/reductions.cuh"
#include "device/vectors.cuh"
#include "ops/cuda/hidden_tap.cuh"

namespace bequest::cuda {

inline constexpr int kNormWarpsPerBlock = 4;  // where a warp has a row
inline constexpr int kNormMaxThreads = 1024;

// Which row this thread works on, and which of its vectors: first, first + step, …
template <bool kWarpPerRow>
struct NormPlace {
  int64_t row = kWarpPerRow ? int64_t{blockIdx.x} * kNormWarpsPerBlock + threadIdx.x / kWarp : blockIdx.x;
  int first = kWarpPerRow ? threadIdx.x % kWarp : threadIdx.x;
  int step = kWarpPerRow ? kWarp : blockDim.x;
};

template <bool kWarpPerRow>
__device__ __forceinline__ float row_sum(float x, float* shared) {
  if constexpr (kWarpPerRow) {
    return warp_sum(x);
  } else {
    return block_reduce(x, shared, [](float a, float b) { return a + b; });
  }
}

// values = x + residual, rounded and stored as the residual.
template <class T, int W, int N>
__device__ __forceinline__ void add_residual(T* residual, float (&values)[N][W], int first, int step,
                                             int num_vectors) {
  // All loads before the first store: the compiler cannot tell that the residual and x are apart.
  float added[N][W];
#pragma unroll
  for (int n = 0; n < N; ++n)
    if (first + n * step < num_vectors) load_vector<T, W>(residual + (first + n * step) * W, added[n]);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    if (first + n * step >= num_vectors) continue;
#pragma unroll
    for (int i = 0; i < W; ++i) values[n][i] = rounded<T>(values[n][i] + added[n][i]);
    store_vector<T, W>(residual + (first + n * step) * W, values[n]);
  }
}

template <class T, int W, int N>
__device__ __forceinline__ void store_row(T* to, const float (&values)[N][W], int first, int step,
                                          int num_vectors) {
#pragma unroll
  for (int n = 0; n < N; ++n)
    if (first + n * step < num_vectors) store_vector<T, W>(to + (first + n * step) * W, values[n]);
}

}  // namespace bequest::cuda
