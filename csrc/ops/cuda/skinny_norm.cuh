// The norm that a product of few rows takes in: bfloat16 pairs of x and of the norm's weight, the gain.
#pragma once

#include "core/dtype.h"
#include "device/pairs.cuh"
#include "ops/cuda/hidden_tap.cuh"
#include "ops/cuda/skinny_linear.h"

namespace bequest::cuda {

// x · gain of two values, their squares added to `square`.
__device__ __forceinline__ uint32_t weighted(uint32_t x, uint32_t gain, float& square) {
  const float low = __uint_as_float(x << 16), high = __uint_as_float(x & 0xffff0000u);
  square += low * low;
  square += high * high;
  return pack(low * __uint_as_float(gain << 16), high * __uint_as_float(gain & 0xffff0000u));
}
__device__ __forceinline__ uint4 weighted(const uint4& x, const uint4& gain, float& square) {
  const uint32_t first = weighted(x.x, gain.x, square), second = weighted(x.y, gain.y, square);
  const uint32_t third = weighted(x.z, gain.z, square);
  return {first, second, third, weighted(x.w, gain.w, square)};
}

__device__ __forceinline__ float square_sum(const uint4& packed) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
  float sum = 0;
#pragma unroll
  for (uint32_t word : words) {
    const float low = __uint_as_float(word << 16), high = __uint_as_float(word & 0xffff0000u);
    sum += low * low;
    sum += high * high;
  }
  return sum;
}

__device__ __forceinline__ uint4 normed(const uint4& x, const uint4& gain, float scale) {
  const uint32_t words[4] = {x.x, x.y, x.z, x.w}, gains[4] = {gain.x, gain.y, gain.z, gain.w};
  uint32_t out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[i] = pack(__uint_as_float(words[i] << 16) * scale * __uint_as_float(gains[i] << 16),
                  __uint_as_float(words[i] & 0xffff0000u) * scale * __uint_as_float(gains[i] & 0xffff0000u));
  }
  return {out[0], out[1], out[2], out[3]};
}

// Stores the rows that somebody wants to see as they are before the norm: of each row the vectors `first`,
// first + step, ... by this thread. rows: [T, K]
__device__ __forceinline__ void tap_rows(const SkinnyLinearParams& p, const void* rows, int first, int step) {
  const int vectors = static_cast<int>(p.in_features) / 8;
#pragma unroll 1
  for (unsigned row = blockIdx.y * gridDim.x + blockIdx.x; row < static_cast<unsigned>(p.num_tokens);
       row += gridDim.x * gridDim.y) {
    auto* to = reinterpret_cast<uint4*>(tap_row<BFloat16>(p.tap, row, p.in_features));
    if (to == nullptr) continue;
    const uint4* from = static_cast<const uint4*>(rows) + int64_t{row} * vectors;
#pragma unroll 1
    for (int i = first; i < vectors; i += step) to[i] = from[i];
  }
}

}  // namespace bequest::cuda
