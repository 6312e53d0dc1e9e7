// A row on its way through a norm: N vectors of W elements per thread, in registers.
#pragma once

#include "device/reductions.cuh"
#include "device/vectors.cuh"

namespace bequest::cuda {

inline constexpr int kNormWarpsPerBlock = 4;  // where a warp has a row
inline constexpr int kNormMaxThreads = 1024;

// Which row this thread works on, and which of its vectors. A row belongs to a warp or to the block.
template <int W, int N, bool kWarpPerRow>
class NormPlace {
 public:
  __device__ explicit NormPlace(int64_t hidden) : num_vectors_(static_cast<int>(hidden / W)) {}

  __device__ int64_t row() const { return row_; }
  __device__ bool is_first() const { return first_ == 0; }  // of the row's threads

  // Calls f(n, at) for the n-th of the thread's vectors, which begins with element `at` of the row.
  template <class F>
  __device__ __forceinline__ void for_each_vector(F f) const {
#pragma unroll
    for (int n = 0; n < N; ++n)
      if (first_ + n * step_ < num_vectors_) f(n, (first_ + n * step_) * W);
  }

 private:
  const int64_t row_ =
      kWarpPerRow ? int64_t{blockIdx.x} * kNormWarpsPerBlock + threadIdx.x / kWarp : blockIdx.x;
  const int first_ = kWarpPerRow ? threadIdx.x % kWarp : threadIdx.x;
  const int step_ = kWarpPerRow ? kWarp : blockDim.x;
  const int num_vectors_;
};

template <class T, int W, int N, bool kWarpPerRow>
__device__ __forceinline__ void load_row(const NormPlace<W, N, kWarpPerRow>& place, const T* from,
                                         float (&values)[N][W]) {
  place.for_each_vector([&](int n, int at) { load_vector<T, W>(from + at, values[n]); });
}

template <class T, int W, int N, bool kWarpPerRow>
__device__ __forceinline__ void store_row(const NormPlace<W, N, kWarpPerRow>& place, T* to,
                                          const float (&values)[N][W]) {
  place.for_each_vector([&](int n, int at) { store_vector<T, W>(to + at, values[n]); });
}

// values += residual, rounded and stored as the residual.
template <class T, int W, int N, bool kWarpPerRow>
__device__ __forceinline__ void add_residual(const NormPlace<W, N, kWarpPerRow>& place, T* residual,
                                             float (&values)[N][W]) {
  // All loads before the first store: the compiler cannot tell that the residual and x are apart.
  float added[N][W];
  load_row(place, residual, added);
  place.for_each_vector([&](int n, int at) {
#pragma unroll
    for (int i = 0; i < W; ++i) values[n][i] = rounded<T>(values[n][i] + added[n][i]);
    store_vector<T, W>(residual + at, values[n]);
  });
}

// term(x) summed over the row, in all of its threads. `shared` holds one float per warp.
template <int W, int N, bool kWarpPerRow, class Term>
__device__ __forceinline__ float sum_row(const NormPlace<W, N, kWarpPerRow>& place,
                                         const float (&values)[N][W], float* shared, Term term) {
  float sum = 0;
  place.for_each_vector([&](int n, int) {
#pragma unroll
    for (int i = 0; i < W; ++i) sum += term(values[n][i]);
  });
  if constexpr (kWarpPerRow) {
    return warp_sum(sum);
  } else {
    return block_reduce(sum, shared, [](float a, float b) { return a + b; });
  }
}

}  // namespace bequest::cuda
