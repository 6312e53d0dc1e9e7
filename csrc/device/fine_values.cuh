// Codes with scales for every 32 values of a row, or fewer, on their way into tensor cores (FineCodec).
//
// A lane reads 16 bytes of a row at once: eight neighbours of each of kGroups groups, and the words of these.
// widen() makes four pairs of float16 of the eight codes of group `group`.
#pragma once

#include "device/pairs.cuh"

namespace bequest::cuda {

__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// One half of a word, twice: the first or the second one.
inline constexpr uint32_t kFirstTwice = 0x1010, kSecondTwice = 0x3232;
__device__ __forceinline__ uint32_t twice(uint32_t word, uint32_t half) { return __byte_perm(word, 0, half); }

namespace fine {

struct Offset4 {
  static constexpr int kBits = 4, kGroups = 4, kWords = 4;  // of a lane's 16 bytes

  // half: of its groups' 32 values the lane has the first 16 or the others
  __device__ static __forceinline__ void widen(const uint32_t (&codes)[4], const uint32_t (&words)[kWords],
                                               int group, uint32_t /*half*/, uint32_t (&pairs)[4]) {
    constexpr uint32_t kSixteenth = 0x2c002c00u;                 // 1 / 16
    constexpr uint32_t kLow = 0x64006400u, kHigh = 0xd400d400u;  // 1024, -64
    const uint32_t scale = twice(words[group], kFirstTwice), offset = twice(words[group], kSecondTwice);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t eight = codes[group] >> (8 * i);
      uint32_t low, high;
      asm("lop3.b32 %0, %1, 0x000f000f, 0x64006400, 0xea;" : "=r"(low) : "r"(eight));
      asm("lop3.b32 %0, %1, 0x00f000f0, 0x64006400, 0xea;" : "=r"(high) : "r"(eight));
      asm("sub.f16x2 %0, %0, %1;" : "+r"(low) : "r"(kLow));
      asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(high) : "r"(kSixteenth), "r"(kHigh));
      asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(pairs[2 * i]) : "r"(low), "r"(scale), "r"(offset));
      asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(pairs[2 * i + 1]) : "r"(high), "r"(scale), "r"(offset));
    }
  }
};

struct Float4 {
  static constexpr int kBits = 4, kGroups = 4, kWords = 1;

  // Exponent and mantissa of e2m1 as the last bits of float16's, which is 2^14 too small: exactly so for its
  // subnormals, too.
  __device__ static __forceinline__ void widen(const uint32_t (&codes)[4], const uint32_t (&words)[kWords],
                                               int group, uint32_t /*half*/, uint32_t (&pairs)[4]) {
    const uint32_t scale = (words[0] >> (8 * group) & 0xff) * 0x04000400u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t top = codes[group] << (12 - 4 * i);
      uint32_t pair;
      asm("lop3.b32 %0, %1, 0x80008000, %2, 0xea;" : "=r"(pair) : "r"(top), "r"(top >> 3 & 0x0e000e00u));
      pairs[i] = multiply_pairs(pair, scale);
    }
  }
};

struct Scaled8 {
  static constexpr int kBits = 8, kGroups = 2, kWords = 2;

  __device__ static __forceinline__ void widen(const uint32_t (&codes)[4], const uint32_t (&words)[kWords],
                                               int group, uint32_t half, uint32_t (&pairs)[4]) {
    constexpr uint32_t kZero = 0x64806480u;  // 1024 + 128
    const uint32_t scale = twice(words[group], half);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // As the last bits of 1024 they are a float16 at once.
      uint32_t pair = __byte_perm(codes[2 * group + i / 2], 0x64646464u, i % 2 == 0 ? 0x4140 : 0x4342);
      asm("sub.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(kZero));
      pairs[i] = multiply_pairs(pair, scale);
    }
  }
};

struct Offset8 {
  static constexpr int kBits = 8, kGroups = 2, kWords = 2;

  __device__ static __forceinline__ void widen(const uint32_t (&codes)[4], const uint32_t (&words)[kWords],
                                               int group, uint32_t /*half*/, uint32_t (&pairs)[4]) {
    constexpr uint32_t kZero = 0x64006400u;  // 1024
    const uint32_t scale = twice(words[group], kFirstTwice), offset = twice(words[group], kSecondTwice);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t pair = __byte_perm(codes[2 * group + i / 2], 0x64646464u, i % 2 == 0 ? 0x4140 : 0x4342);
      asm("sub.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(kZero));
      asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(pairs[i]) : "r"(pair), "r"(scale), "r"(offset));
    }
  }
};

struct Float8 {
  static constexpr int kBits = 8, kGroups = 2, kWords = 2;

  __device__ static __forceinline__ void widen(const uint32_t (&codes)[4], const uint32_t (&words)[kWords],
                                               int group, uint32_t half, uint32_t (&pairs)[4]) {
    const uint32_t scale = twice(words[group], half);
    fp8_to_f16(codes[2 * group], pairs[0], pairs[1]);
    fp8_to_f16(codes[2 * group + 1], pairs[2], pairs[3]);
#pragma unroll
    for (uint32_t& pair : pairs) pair = multiply_pairs(pair, scale);
  }
};

}  // namespace fine
}  // namespace bequest::cuda
