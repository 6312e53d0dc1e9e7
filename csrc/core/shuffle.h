// Lanes moved across vectors, for *.simd.cpp files.
#pragma once

#include "core/simd.h"

namespace bequest::BEQUEST_ISA {

// The two halves of a and b interleaved: {a0 b0 a1 b1 ...} from the lower or the upper half.
#if defined(BEQUEST_ISA_avx512)
inline VecF interleave_low(VecF a, VecF b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
inline VecF interleave_high(VecF a, VecF b) {
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
#elif defined(BEQUEST_ISA_avx2)
inline VecF interleave_low(VecF a, VecF b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
inline VecF interleave_high(VecF a, VecF b) {
  return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
}
#else
inline VecF interleave_low(VecF a, VecF b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
inline VecF interleave_high(VecF a, VecF b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
#endif

// rows[i][j] ↔ rows[j][i]: a perfect shuffle, log2(kLanes) times.
inline void transpose(VecF (&rows)[kLanes]) {
  for (int width = 1; width < kLanes; width *= 2) {
    VecF next[kLanes];
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = interleave_low(rows[i], rows[i + kLanes / 2]);
      next[2 * i + 1] = interleave_high(rows[i], rows[i + kLanes / 2]);
    }
    for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
  }
}

// The largest lane, in log2(kLanes) steps.
inline float largest_lane(VecF v) {
#if defined(BEQUEST_ISA_avx512)
  v = max(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = max(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = max(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  v = max(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  return v[0];
#else
  float lanes[kLanes];
  store(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  return lanes[0];
#endif
}

}  // namespace bequest::BEQUEST_ISA
