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

enum class DType : int { kF32 = 0, kBF16 = 1 };

struct BFloat16 {
  uint16_t bits;
};

[[gnu::always_inline]] inline float to_float(float x) { return x; }
[[gnu::always_inline]] inline float to_float(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof(y));
  return y;
}

template <class T>
[[gnu::always_inline]] inline T from_float(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
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
  }
  fail("unknown dtype");
}

// dispatch(dtype, [&]<class T>() { ... }) calls the lambda with the C++ type of `dtype`.
template <class F>
decltype(auto) dispatch(DType t, F&& f) {
  switch (t) {
    case DType::kF32:
      return std::forward<F>(f).template operator()<float>();
    case DType::kBF16:
      return std::forward<F>(f).template operator()<BFloat16>();
  }
  fail("unknown dtype");
}

}  // namespace bequest
