// The arithmetic on register tiles that attention is made of, for *.simd.cpp files.
//
// Bits: every element of a product is one chain of fused multiply-adds in the order of the inner index, so it
// does not matter how many rows or columns share a register tile.
#pragma once

#include "attention/plan.h"
#include "attention/scratch.h"
#include "core/simd.h"

namespace bequest::BEQUEST_ISA {

// Vectors per row of a register tile: kRowBlock * kColumnBlock accumulators plus operands fit the registers.
#if defined(BEQUEST_ISA_avx2)
inline constexpr int kColumnBlock = 2;
#else
inline constexpr int kColumnBlock = 4;
#endif

enum class Start { kZero, kAccumulate };

// c[R, C * kLanes] (+)= a[R, depth] · b[depth, C * kLanes].
template <int R, int C, Start kStart>
inline void multiply_tile(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c,
                          int64_t c_stride, int64_t depth) {
  VecF sum[R][C];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < C; ++i)
      sum[r][i] = kStart == Start::kZero ? VecF{} : load(c + r * c_stride + i * kLanes);
  for (int64_t k = 0; k < depth; ++k) {
    VecF row[C];
    for (int i = 0; i < C; ++i) row[i] = load(b + k * b_stride + i * kLanes);
    for (int r = 0; r < R; ++r) {
      const VecF x = broadcast(a[r * a_stride + k]);
      for (int i = 0; i < C; ++i) sum[r][i] += x * row[i];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < C; ++i) store(c + r * c_stride + i * kLanes, sum[r][i]);
}

// c[R, vectors * kLanes] (+)= a[R, depth] · b[depth, vectors * kLanes].
template <int R, Start kStart>
inline void multiply_rows(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c,
                          int64_t c_stride, int64_t depth, int vectors) {
  while (vectors >= kColumnBlock) {
    multiply_tile<R, kColumnBlock, kStart>(a, a_stride, b, b_stride, c, c_stride, depth);
    b += kColumnBlock * kLanes;
    c += kColumnBlock * kLanes;
    vectors -= kColumnBlock;
  }
  if (vectors & 2) {
    multiply_tile<R, 2, kStart>(a, a_stride, b, b_stride, c, c_stride, depth);
    b += 2 * kLanes;
    c += 2 * kLanes;
  }
  if (vectors & 1) multiply_tile<R, 1, kStart>(a, a_stride, b, b_stride, c, c_stride, depth);
}

template <Start kStart>
inline void multiply(int rows, const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c,
                     int64_t c_stride, int64_t depth, int vectors) {
  static_assert(kRowBlock == 6);
  switch (rows) {
    case 1:
      return multiply_rows<1, kStart>(a, a_stride, b, b_stride, c, c_stride, depth, vectors);
    case 2:
      return multiply_rows<2, kStart>(a, a_stride, b, b_stride, c, c_stride, depth, vectors);
    case 3:
      return multiply_rows<3, kStart>(a, a_stride, b, b_stride, c, c_stride, depth, vectors);
    case 4:
      return multiply_rows<4, kStart>(a, a_stride, b, b_stride, c, c_stride, depth, vectors);
    case 5:
      return multiply_rows<5, kStart>(a, a_stride, b, b_stride, c, c_stride, depth, vectors);
    default:
      return multiply_rows<6, kStart>(a, a_stride, b, b_stride, c, c_stride, depth, vectors);
  }
}

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

// e^x for x <= 0, to about 1 ulp; 0 below -87.3; NaN is kept, so a broken row shows.
inline VecF exp_nonpositive(VecF x) {
  const VecF lowest = broadcast(-87.3365f);
  const VecF clamped = x < lowest ? lowest : x;
  const VecF shift = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const VecF shifted = clamped * 1.44269504f + shift;
  const VecF n = shifted - shift;
  VecF r = clamped - n * 0.693145752f;
  r = r - n * 1.42860677e-6f;
  VecF p = broadcast(1.98756915e-4f);
  p = p * r + 1.39819995e-3f;
  p = p * r + 8.33345205e-3f;
  p = p * r + 4.16657962e-2f;
  p = p * r + 1.66666657e-1f;
  p = p * r + 5.00000012e-1f;
  p = p * (r * r) + (r + 1.0f);
  const VecF power = (VecF)(((VecI)shifted + 127) << 23);  // the low bits of `shifted` hold n
  return x < lowest ? VecF{} : p * power;
}

// c * tanh(x / c)
inline VecF soft_cap(VecF x, float cap) {
  const VecF magnitude = (VecF)((VecU)x & 0x7fffffffu);
  const VecF e = exp_nonpositive(magnitude * (-2.0f / cap));
  const VecF y = cap * (1.0f - e) / (1.0f + e);
  return (VecF)((VecU)y | ((VecU)x & 0x80000000u));
}

}  // namespace bequest::BEQUEST_ISA
