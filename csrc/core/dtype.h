// Element types of tensors that cross into the core, and dispatch over them that throws on the unlisted
// value. Always inlined: a *.simd.cpp may use them without emitting shared code (see core/isa.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "core/check.h"

namespace bequest {

// kF8E4M3 is for caches alone: sign, 4 bits of exponent, 3 of mantissa; the largest value is 448, there is no
// infinity, and 0x7f is NaN.
enum class DType : int { kF32 = 0, kBF16 = 1, kF8E4M3 = 2 };

struct BFloat16 {
  uint16_t bits;
};
struct Float8 {
  uint8_t bits;
};

[[gnu::always_inline]] inline float to_float(float x) { return x; }
[[gnu::always_inline]] inline float to_float(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof(y));
  return y;
}
[[gnu::always_inline]] inline float to_float(Float8 x) {
  const uint32_t sign = uint32_t{x.bits & 0x80u} << 24, magnitude = x.bits & 0x7fu;
  const float small = static_cast<float>(magnitude) * 0x1p-9f;  // of those with exponent 0
  uint32_t bits;
  std::memcpy(&bits, &small, sizeof(bits));
  if (magnitude >= 8) bits = (magnitude << 20) + (120u << 23);
  if (magnitude == 0x7f) bits = 0x7fc00000u;
  bits |= sign;
  float y;
  std::memcpy(&y, &bits, sizeof(y));
  return y;
}

// Rounded to nearest even; to Float8 what is too large becomes the largest value.
template <class T>
[[gnu::always_inline]] inline T from_float(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, Float8>) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    const auto sign = static_cast<uint8_t>(bits >> 24 & 0x80u);
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return {static_cast<uint8_t>(sign | 0x7f)};
    if (bits >= 0x43e00000u) return {static_cast<uint8_t>(sign | 0x7e)};  // 448
    if (bits < 0x3c800000u) {                                             // 2^-6: below it multiples of 2^-9
      float y;
      std::memcpy(&y, &bits, sizeof(y));
      y += 16384.0f;  // whose last bit is worth 2^-9
      std::memcpy(&bits, &y, sizeof(bits));
      return {static_cast<uint8_t>(sign | (bits & 15))};
    }
    bits += 0x7ffffu + (bits >> 20 & 1);
    return {static_cast<uint8_t>(sign | ((bits >> 20) - (120u << 3)))};
  } else {
    static_assert(std::is_same_v<T, BFloat16>);
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40)};  // quiet NaN
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16)};  // round to nearest even
  }
}

[[gnu::always_inline]] inline size_t size_of(DType t) {
  switch (t) {
    case DType::kF32:
      return 4;
    case DType::kBF16:
      return 2;
    case DType::kF8E4M3:
      return 1;
  }
  fail("unknown dtype");
}

// dispatch(dtype, [&]<class T>() { ... }) calls the lambda with the C++ type of `dtype`, float32 or bfloat16.
template <class F>
decltype(auto) dispatch(DType t, F&& f) {
  switch (t) {
    case DType::kF32:
      return std::forward<F>(f).template operator()<float>();
    case DType::kBF16:
      return std::forward<F>(f).template operator()<BFloat16>();
    case DType::kF8E4M3:
      break;
  }
  fail("a dtype that only caches have");
}

}  // namespace bequest
