// Pairs of 16-bit numbers in a register, as tensor cores take them, and what they are made of.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace bequest::cuda {

using bf16 = __nv_bfloat16;

__device__ inline uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
// Beyond 65504 they stay there; NaN stays NaN.
__device__ inline uint32_t pack_f16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// A pair of bf16 as float16: exact for magnitudes from 2^-14 to 65504.
__device__ inline uint32_t bf16_to_f16(uint32_t pair) {
  return pack_f16(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Four e4m3 → two pairs of float16, exactly. One instruction per pair.
__device__ inline void fp8_to_f16(uint32_t four, uint32_t& low, uint32_t& high) {
  asm("{\n"
      ".reg .b16 first, second;\n"
      "mov.b32 {first, second}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, first;\n"
      "cvt.rn.f16x2.e4m3x2 %1, second;\n"
      "}"
      : "=r"(low), "=r"(high)
      : "r"(four));
}

// The same as bf16, exactly too.
__device__ inline void fp8_to_bf16(uint32_t four, uint32_t& low, uint32_t& high) {
  const auto convert = [](uint32_t pair) {
    const float2 both = __half22float2(reinterpret_cast<const __half2&>(pair));
    return pack(both.x, both.y);
  };
  fp8_to_f16(four, low, high);
  low = convert(low);
  high = convert(high);
}

}  // namespace bequest::cuda
