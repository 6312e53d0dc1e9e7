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

// What codes of 4 bits stand for: (code - zero) · scale. A word has the zero in its last 8 bits and the scale
// as a float32 in the others.
struct CodeGroup {
  float scale;
  uint32_t low_offset, high_offset;  // pairs of float16: 1024 + zero, and -(64 + zero)

  __device__ __forceinline__ explicit CodeGroup(uint32_t word) {
    const uint32_t zero = word & 0xff;
    scale = __uint_as_float(word & 0xffffff00u);
    low_offset = (0x6400u + zero) * 0x10001u;
    high_offset = (0xd400u + zero * 16) * 0x10001u;
  }
};

// Eight codes of 4 bits → four pairs of float16, code - zero, exactly. Pair i has the codes i and i + 4 of
// the word: as the last bits of 1024 they are a float16 at once, sixteenfold in their place beside them.
__device__ __forceinline__ void int4_to_f16(uint32_t eight, const CodeGroup& group, uint32_t (&pairs)[4]) {
  constexpr uint32_t kSixteenth = 0x2c002c00u;  // 1 / 16
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t codes = eight >> (8 * i);
    uint32_t low, high;
    asm("lop3.b32 %0, %1, 0x000f000f, 0x64006400, 0xea;" : "=r"(low) : "r"(codes));
    asm("lop3.b32 %0, %1, 0x00f000f0, 0x64006400, 0xea;" : "=r"(high) : "r"(codes));
    asm("sub.f16x2 %0, %1, %2;" : "=r"(pairs[2 * i]) : "r"(low), "r"(group.low_offset));
    asm("fma.rn.f16x2 %0, %1, %2, %3;"
        : "=r"(pairs[2 * i + 1])
        : "r"(high), "r"(kSixteenth), "r"(group.high_offset));
  }
}

// Four e4m3 as bf16, exactly too.
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
