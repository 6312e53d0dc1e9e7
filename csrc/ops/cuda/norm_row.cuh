// What norms do to a row.
#pragma once

#include "ops/cuda/row_place.cuh"

namespace bequest::cuda {

inline constexpr int kNormMaxThreads = 1024;

// row += added, rounded and stored as the residual.
template <class T, int W, int N, bool kWarpPerRow>
__device__ __forceinline__ void add_residual(const RowPlace<W, N, kWarpPerRow>& place,
                                             const Packed<T, W> (&added)[N], T* residual,
                                             Packed<T, W> (&row)[N]) {
  place.for_each_vector([&](int n, int at) {
    float sum[W], more[W];
    unpack<T, W>(row[n], sum);
    unpack<T, W>(added[n], more);
#pragma unroll
    for (int i = 0; i < W; ++i) sum[i] += more[i];
    row[n] = pack<T, W>(sum);
    store_packed<T, W>(residual + at, row[n]);
  });
}

// term(x) summed over the row, in all of its threads. `shared` holds one float per warp.
template <class T, int W, int N, bool kWarpPerRow, class Term>
__device__ __forceinline__ float sum_row(const RowPlace<W, N, kWarpPerRow>& place,
                                         const Packed<T, W> (&row)[N], float* shared, Term term) {
  float sum = 0;
  place.for_each_vector([&](int n, int) {
    float values[W];
    unpack<T, W>(row[n], values);
#pragma unroll
    for (int i = 0; i < W; ++i) sum += term(values[i]);
  });
  return place.reduce(sum, shared, [](float a, float b) { return a + b; });
}

}  // namespace bequest::cuda
