// Queries, keys and values on their way into the matrix unit's tiles, for *.amx.cpp files: rounded to
// bfloat16 where they are not, to nearest even.
#pragma once

#include "attention/cpu/key_rows.h"
#include "core/amx_tiles.h"
#include "core/shuffle.h"

namespace bequest::amx {

// 32 elements as bfloat16.
template <class T>
inline __m512i load_pairs(const T* p) {
  return round_to_bfloat16((__m512)load(p), (__m512)load(p + kLanes));
}
inline __m512i load_pairs(const BFloat16* p) { return _mm512_loadu_si512(p); }

// 16 elements as bfloat16, zeros behind them.
template <class T>
inline __m512i load_half_pairs(const T* p) {
  return round_to_bfloat16((__m512)load(p), (__m512)VecF{});
}
inline __m512i load_half_pairs(const BFloat16* p) {
  return _mm512_maskz_broadcast_i64x4(0x0f, _mm256_loadu_si256((const __m256i*)p));
}

// Elements [d, d + 32) of a row of `dim`, zero beyond it.
template <class T>
inline __m512i load_depth(const T* row, int d, int dim) {
  if (d + 32 <= dim) return load_pairs(row + d);
  if (d + 16 == dim) return load_half_pairs(row + d);
  T padded[32] = {};
  for (int i = 0; d + i < dim; ++i) padded[i] = row[d + i];
  return load_pairs(padded);
}

// 16 elements as float32, rounded to bfloat16.
template <class T>
inline VecF load_rounded(const T* p) {
  const __m256i rounded = (__m256i)_mm512_cvtneps_pbh((__m512)load(p));
  return (VecF)_mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, rounded), 16);
}
inline VecF load_rounded(const BFloat16* p) { return load(p); }
inline VecF load_rounded(const Float8* p) { return load(p); }  // every one is a bfloat16

// One tile: rows[i][32 of D], as the left side of a product wants them, or transposed in pairs, as the right.
inline void store_rows(const __m512i (&rows)[kLanes], BFloat16* tile) {
  for (int i = 0; i < kLanes; ++i) _mm512_store_si512(tile + 32 * i, rows[i]);
}
inline void store_columns(const __m512i (&rows)[kLanes], BFloat16* tile) {
  VecF square[kLanes];
  for (int i = 0; i < kLanes; ++i) square[i] = (VecF)rows[i];
  transpose(square);
  for (int i = 0; i < kLanes; ++i) _mm512_store_si512(tile + 32 * i, (__m512i)square[i]);
}

// tiles [kKeyTile / 16, D / 32] of keys
template <class T>
void pack_keys(const KeyRows<T>& rows, int dim, BFloat16* tiles) {
  for (int j = 0; j < kKeyTile; j += kLanes)
    for (int d = 0; d < dim; d += 32, tiles += 512) {
      __m512i depth[kLanes];
      for (int i = 0; i < kLanes; ++i) depth[i] = load_depth(rows.at[j + i], d, dim);
      store_columns(depth, tiles);
    }
}

// 16 elements of each of two rows.
template <class T>
inline __m512i load_both(const T* a, const T* b) {
  return round_to_bfloat16((__m512)load(a), (__m512)load(b));
}
inline __m512i load_both(const BFloat16* a, const BFloat16* b) {
  const __m512i low = _mm512_maskz_broadcast_i64x4(0xff, _mm256_loadu_si256((const __m256i*)a));
  return _mm512_maskz_inserti64x4(0xff, low, _mm256_loadu_si256((const __m256i*)b), 1);
}

// tiles [kKeyTile / 32, D / 16] of values; D is rounded up to 32
template <class T>
void pack_values(const KeyRows<T>& rows, int64_t values_after_keys, int dim, BFloat16* tiles) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                         23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const int columns = (dim + 31) / 32 * 2;
  const auto store = [&](const T* a, const T* b, BFloat16* to) {
    _mm512_store_si512(to, _mm512_permutexvar_epi16(order, load_both(a, b)));
  };
  for (int j = 0; j < kKeyTile; j += 2) {
    const T* a = rows.at[j] + values_after_keys;
    const T* b = rows.at[j + 1] + values_after_keys;
    BFloat16* to = tiles + j / 32 * columns * 512 + j % 32 * 16;
    int d = 0;
    for (; d + kLanes <= dim; d += kLanes, to += 512) store(a + d, b + d, to);
    for (; d < columns * kLanes; d += kLanes, to += 512) {
      T padded[2][kLanes] = {};
      for (int i = 0; d + i < dim; ++i) padded[0][i] = a[d + i], padded[1][i] = b[d + i];
      store(padded[0], padded[1], to);
    }
  }
}

}  // namespace bequest::amx
