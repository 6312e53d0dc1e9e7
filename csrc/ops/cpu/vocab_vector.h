// Vectors over a row of logits, for *.simd.cpp files.
#pragma once

#include "core/simd.h"

namespace bequest::BEQUEST_ISA {

inline constexpr float kInfinity = __builtin_inff();

// Bit i is set where lane i of a comparison is true.
inline uint32_t lane_bits(VecI mask) {
#if defined(BEQUEST_ISA_avx512)
  return _mm512_movepi32_mask((__m512i)mask);
#elif defined(BEQUEST_ISA_avx2)
  return static_cast<uint32_t>(_mm256_movemask_ps((__m256)mask));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= static_cast<uint32_t>(mask[i] & 1) << i;
  return bits;
#endif
}

// x[i .. n), padded with -inf to a whole vector.
inline VecF load_tail(const float* x, int64_t i, int64_t n) {
  float lanes[kLanes];
  for (int64_t j = 0; j < kLanes; ++j) lanes[j] = i + j < n ? x[i + j] : -kInfinity;
  return load(lanes);
}

// f(vector, index of its first element) over x [n]; the last one is padded with -inf.
template <class F>
inline void for_each_vector(const float* x, int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(load(x + i), i);
  if (i < n) f(load_tail(x, i, n), i);
}

}  // namespace bequest::BEQUEST_ISA
