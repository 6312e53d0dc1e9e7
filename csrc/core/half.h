// float16 as 16 bits, where no vector of it is at hand. On the CPU a cache may be stored in it; no kernel of
// a GPU knows it, so it is not among the types of core/dtype.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/dtype.h"

namespace bequest {

struct Float16 {
  uint16_t bits;
};

// What a cache in float16 is called where it is dispatched.
inline constexpr DType kF16 = DType{3};

[[gnu::always_inline]] inline float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16;
  const uint32_t exponent = half >> 10 & 31, mantissa = half & 0x3ffu;
  if (exponent == 0) {  // a multiple of 2^-24
    const float value = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
    return sign ? -value : value;
  }
  const uint32_t wide = exponent == 31 ? 255 : exponent + 112;
  const uint32_t bits = sign | wide << 23 | mantissa << 13;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

[[gnu::always_inline]] inline float to_float(Float16 x) { return half_to_float(x.bits); }

}  // namespace bequest
