// What kernels that round rows to e4m3 share.
#pragma once

#include "ops/cuda/float8_rows.h"
#include "ops/cuda/row_place.cuh"

namespace bequest::cuda {

// By the largest magnitude of the row: its code is the largest there is.
__device__ __forceinline__ float float8_scale(float largest) {
  constexpr float kLargestCode = 448;
  return largest > 0 ? largest / kLargestCode : 1.0f;
}

// A row of `width` in bfloat16, rounded. The bits do not depend on who has which of its vectors. `shared`
// holds one float per warp.
template <int W, int N, bool kWarpPerRow>
__device__ __forceinline__ void store_float8(const RowPlace<W, N, kWarpPerRow>& place, const Float8Rows& to,
                                             int64_t width, const Packed<BFloat16, W> (&row)[N],
                                             float* shared) {
  float largest = 0;
  place.for_each_vector([&](int n, int) {
    float x[W];
    unpack<BFloat16, W>(row[n], x);
#pragma unroll
    for (float value : x) largest = fmaxf(largest, fabsf(value));
  });
  largest = place.reduce(largest, shared, [](float a, float b) { return fmaxf(a, b); });
  const float scale = float8_scale(largest), factor = 1.0f / scale;
  if (place.is_first()) to.scales[place.row()] = scale;
  Float8* codes = static_cast<Float8*>(to.codes) + place.row() * width;
  place.for_each_vector([&](int n, int at) {
    float x[W];
    unpack<BFloat16, W>(row[n], x);
#pragma unroll
    for (float& value : x) value *= factor;
    store_vector<Float8, W>(codes + at, x);
  });
}

}  // namespace bequest::cuda
