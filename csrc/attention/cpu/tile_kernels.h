// The arithmetic on register tiles that attention is made of, for *.simd.cpp files.
//
// Bits: every element of a product is one chain of fused multiply-adds in the order of the inner index, so it
// does not matter how many rows or columns share a register tile.
#pragma once

#include "attention/cpu/plan.h"
#include "attention/cpu/scratch.h"
#include "core/shuffle.h"
#include "core/simd.h"
#if defined(BEQUEST_ISA_neon)
#include "attention/cpu/neon_products.h"
#include "attention/cpu/neon_weights.h"
#endif

namespace bequest::BEQUEST_ISA {

// Vectors per row of a register tile: kRowBlock * kColumnBlock accumulators plus operands fit the registers.
#if defined(BEQUEST_ISA_avx2)
inline constexpr int kColumnBlock = 2;
#else
inline constexpr int kColumnBlock = 4;
#endif

// What a product is added to: nothing, or its old rows, each times a factor of its own. The factors are read
// when the product is there, because they come from a chain of operations that nobody should wait for.
struct ToZero {
  VecF add(const float*, int, VecF sum) const { return sum; }
};
struct ToShrunk {
  const float* factors;  // [R]
  VecF add(const float* c, int row, VecF sum) const { return load(c) * factors[row] + sum; }
};

// Calls f.template operator()<rows>() for 1 <= rows <= kMost.
template <int kMost, class F>
inline void with_rows(int rows, F&& f) {
  if constexpr (kMost > 1) {
    if (rows < kMost) return with_rows<kMost - 1>(rows, f);
  }
  f.template operator()<kMost>();
}

// f.template operator()<R>(row) for blocks of rows that make up [0, count), all of kRowBlock but the last.
template <class F>
inline void in_blocks(int count, F&& f) {
  for (int row = 0; row < count; row += kRowBlock)
    with_rows<kRowBlock>(count - row < kRowBlock ? count - row : kRowBlock,
                         [&]<int R>() { f.template operator()<R>(row); });
}

// The right side of a product, row by row.
struct DenseRows {
  const float* base;
  int64_t stride;
  const float* row(int64_t k) const { return base + k * stride; }
};
template <class T>
struct ScatteredRows {
  const T* const* at;
  int64_t offset;
  const T* row(int64_t k) const { return at[k] + offset; }
};

#if !defined(BEQUEST_ISA_neon)  // neon_products.h, neon_weights.h

// c[R, C * kLanes] = to c + a[R, depth] · b[depth, column .. column + C * kLanes).
template <int R, int C, class To, class Rows>
inline void multiply_tile(To to, const float* a, int64_t a_stride, Rows b, int64_t column, float* c,
                          int64_t c_stride, int64_t depth) {
  VecF sum[R][C];
  // Unrolled by order: the compiler would keep the sums in memory as well.
  const auto each = [&](auto f) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < C; ++i) f(sum[r][i], r, i);
  };
  each([](VecF& s, int, int) { s = VecF{}; });
  for (int64_t k = 0; k < depth; ++k) {
    VecF row[C];
#pragma GCC unroll 4
    for (int i = 0; i < C; ++i) row[i] = load(b.row(k) + column + i * kLanes);
    each([&](VecF& s, int r, int i) { s += broadcast(a[r * a_stride + k]) * row[i]; });
  }
  each([&](VecF& s, int r, int i) {
    float* at = c + r * c_stride + column + i * kLanes;
    store(at, to.add(at, r, s));
  });
}

// c[R, vectors * kLanes] = to c + a[R, depth] · b[depth, vectors * kLanes].
template <int R, class To, class Rows>
inline void multiply(To to, const float* a, int64_t a_stride, Rows b, float* c, int64_t c_stride,
                     int64_t depth, int vectors) {
  constexpr int kWide = R <= kRowBlock ? kColumnBlock : kColumnBlock / 2;
  int v = 0;
  for (; v + kWide <= vectors; v += kWide)
    multiply_tile<R, kWide>(to, a, a_stride, b, v * kLanes, c, c_stride, depth);
  for (; v < vectors; ++v) multiply_tile<R, 1>(to, a, a_stride, b, v * kLanes, c, c_stride, depth);
}

// e^x for x <= 0, to about 1 ulp; 0 below -87.3; NaN is kept, so a broken row shows.
inline VecF exp_nonpositive(VecF x) {
  const VecF lowest = broadcast(-87.3365f);
  const VecF clamped = max(lowest, x);
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
#if defined(BEQUEST_ISA_avx512)
  return (VecF)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, lowest, _CMP_NLT_UQ), p, n);
#else
  const VecF power = (VecF)(((VecI)shifted + 127) << 23);  // the low bits of `shifted` hold n
  return x < lowest ? VecF{} : p * power;
#endif
}

#endif

// c * tanh(x / c)
inline VecF soft_cap(VecF x, float cap) {
  const VecF magnitude = (VecF)((VecU)x & 0x7fffffffu);
  const VecF e = exp_nonpositive(magnitude * (-2.0f / cap));
  const VecF y = cap * (1.0f - e) / (1.0f + e);
  return (VecF)((VecU)y | ((VecU)x & 0x80000000u));
}

}  // namespace bequest::BEQUEST_ISA
