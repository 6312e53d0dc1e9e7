// The arithmetic of attention in bfloat16, for *.amx.cpp files: scores, weights, weighted values.
//
// Bits: every number is made of its own row and of keys in the same order, whatever rows are beside it. So is
// `weigh_values_in_place`, which does with vectors, and with values where they lie, what the matrix unit does
// (core/amx_tiles.h): even and odd keys summed apart, then both added.
#pragma once

#include "attention/cpu/amx_packing.h"
#include "attention/cpu/amx_scratch.h"
#include "attention/cpu/tile_kernels.h"

namespace bequest::amx {

// Rows that attend to keys and values where they lie: packed, these would be used by too few.
inline constexpr int kFewRows = 8;
inline constexpr int kStep = 32;                               // keys that one product takes
inline constexpr int kTileFloats = 256;                        // float32 in a tile
inline constexpr int kTileHalves = 512;                        // bfloat16 in a tile
inline constexpr int kHalfScores = kSplit / 16 * kTileFloats;  // from one half of the rows to the other
inline constexpr int kHalfWeights = kSplit / kStep * kTileHalves;

// For `score_columns`: tiles 0 and 1 are sums and 6 is the queries, a column for each.
inline TileSizes column_sizes(int rows) {
  TileSizes sizes;
  sizes.row_bytes[0] = sizes.row_bytes[1] = sizes.row_bytes[6] = static_cast<uint16_t>(rows * sizeof(float));
  return sizes;
}

// 2^x to 2^-18, for any x; 0 for -inf. NaN is kept.
inline __m512 exp2_weight(__m512 x) {
  // GCC 12 warns of the unmasked intrinsics.
  const __m512 f = _mm512_maskz_reduce_ps(0xffff, x, _MM_FROUND_TO_NEG_INF);  // x - floor(x)
  __m512 p = _mm512_set1_ps(0.0135341678f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.0520114601f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.241442755f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.693003833f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.00000262f));
  // p · 2^floor(x), or 0 where that would be subnormal, which takes the chip a hundred times as long.
  const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(normal, p, x);
}

// scores [kHalves, kSplit / 16] tiles = q · keysᵀ for the keys of a step.
template <int kHalves>
inline void score_step(const BFloat16* q, const BFloat16* keys, int depth_tiles, int step, float* scores) {
  const int64_t depth = int64_t{depth_tiles} * kTileHalves;
  const BFloat16* k = keys + 2 * step * depth;
  zero_tile<0>();
  zero_tile<1>();
  if constexpr (kHalves == 2) zero_tile<2>(), zero_tile<3>();
  for (int64_t at = 0; at < depth; at += kTileHalves) {
    load_tile<4>(q + at, kTileRowBytes);
    load_tile<6>(k + at, kTileRowBytes);
    multiply_tiles<0, 4, 6>();
    load_tile<7>(k + depth + at, kTileRowBytes);
    multiply_tiles<1, 4, 7>();
    if constexpr (kHalves == 2) {
      load_tile<5>(q + depth + at, kTileRowBytes);
      multiply_tiles<2, 5, 6>();
      multiply_tiles<3, 5, 7>();
    }
  }
  float* to = scores + 2 * step * kTileFloats;
  store_tile<0>(to, kTileRowBytes);
  store_tile<1>(to + kTileFloats, kTileRowBytes);
  if constexpr (kHalves == 2) {
    store_tile<2>(to + kHalfScores, kTileRowBytes);
    store_tile<3>(to + kHalfScores + kTileFloats, kTileRowBytes);
  }
}

// Sixteen keys from the first of `at` on and 32 of D from d on, as a tile of rows: where they lie if they do
// so, else copied to `room`.
struct TileRows {
  const void* base;
  int64_t stride;  // bytes
};
template <class T>
inline TileRows key_rows(const T* const* at, int d, int dim, int block_size, BFloat16* room) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    // Of sixteen keys at most two blocks: those that are side by side are in one.
    if (block_size >= 16 && d + 32 <= dim && at[15] == at[0] + 15 * dim)
      return {at[0] + d, int64_t{dim} * static_cast<int64_t>(sizeof(T))};
  }
  for (int i = 0; i < kLanes; ++i) _mm512_store_si512(room + 32 * i, load_depth(at[i], d, dim));
  return {room, kTileRowBytes};
}

// A tile of keys, or of their values, that is read next: asked for while its predecessor is multiplied.
template <class T>
struct NextRows {
  const T* const* at;  // [kKeyTile] keys
  int64_t offset;      // 0, or that of values behind them
};

// scores [kKeyTile / 16] tiles = (keys · q)ᵀ for a few rows: the keys need no packing so, and their products
// are the same. q is [D / 32] tiles of 16 pairs along D × R; `room` is that of 32 keys.
// REQUIRES: tiles of column_sizes(R)
template <class T>
inline void score_columns(const BFloat16* q, int num_rows, const KeyRows<T>& keys, NextRows<T> next, int dim,
                          int block_size, BFloat16* room, float* scores) {
  const VecI lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int tiled = static_cast<int>(AmxScratch::tiled_dim(dim));
  const auto load_rows = [&]<int kTile>(int j, int d) {
    const TileRows rows = key_rows(keys.at + j, d, dim, block_size, room + (d + j % kStep / 16 * tiled) * 16);
    load_tile<kTile>(rows.base, rows.stride);
    for (int i = 0; i < 16; ++i)
      for (int byte = 0; byte < 32 * int{sizeof(T)}; byte += 64)
        fetch_ahead(reinterpret_cast<const char*>(next.at[j + i] + next.offset + d) + byte);
  };
  const auto write_scores = [&]<int kTile>(float* to) {
    if (num_rows == 1) return store_tile<kTile>(to, sizeof(float));
    alignas(64) float columns[16 * kFewRows];  // [16 keys, R]
    store_tile<kTile>(columns, num_rows * static_cast<int64_t>(sizeof(float)));
    for (int r = 0; r < num_rows; ++r)
      store(to + 16 * r, (VecF)_mm512_mask_i32gather_ps(_mm512_setzero_ps(), 0xffff,
                                                        (__m512i)(lane * num_rows), columns + r, 4));
  };
  for (int j = 0; j < kKeyTile; j += kStep, scores += 2 * kTileFloats) {
    zero_tile<0>();
    zero_tile<1>();
    for (int d = 0; d < dim; d += 32) {
      load_tile<6>(q + d * 16, kTileRowBytes);
      load_rows.template operator()<4>(j, d);
      multiply_tiles<0, 4, 6>();
      load_rows.template operator()<5>(j + 16, d);
      multiply_tiles<1, 5, 6>();
    }
    write_scores.template operator()<0>(scores);
    write_scores.template operator()<1>(scores + kTileFloats);
  }
}

// o [16 * kHalves, D] = weights · values over the keys of some steps.
template <int kHalves>
inline void weigh_values(const BFloat16* weights, const BFloat16* values, KeyRange steps, int dim, float* o) {
  const int64_t column_tiles = dim / 16;
  for (int c = 0; c < column_tiles; c += 2) {
    zero_tile<0>();
    zero_tile<1>();
    if constexpr (kHalves == 2) zero_tile<2>(), zero_tile<3>();
    for (int64_t step = steps.begin; step < steps.end; ++step) {
      const BFloat16* v = values + (step * column_tiles + c) * kTileHalves;
      load_tile<4>(weights + step * kTileHalves, kTileRowBytes);
      load_tile<6>(v, kTileRowBytes);
      multiply_tiles<0, 4, 6>();
      load_tile<7>(v + kTileHalves, kTileRowBytes);
      multiply_tiles<1, 4, 7>();
      if constexpr (kHalves == 2) {
        load_tile<5>(weights + kHalfWeights + step * kTileHalves, kTileRowBytes);
        multiply_tiles<2, 5, 6>();
        multiply_tiles<3, 5, 7>();
      }
    }
    const int64_t row_bytes = dim * sizeof(float);
    float* to = o + c * 16;
    store_tile<0>(to, row_bytes);
    store_tile<1>(to + 16, row_bytes);
    if constexpr (kHalves == 2) {
      store_tile<2>(to + 16 * dim, row_bytes);
      store_tile<3>(to + 16 * dim + 16, row_bytes);
    }
  }
}

// The weights of a row and step, 2^(factor · score - shift), rounded.
inline __m512i weights_of(const float* scores, __m512 factor, float shift) {
  const __m512 less = _mm512_set1_ps(shift);
  const __m512 low = _mm512_fmsub_ps(_mm512_load_ps(scores), factor, less);
  const __m512 high = _mm512_fmsub_ps(_mm512_load_ps(scores + kTileFloats), factor, less);
  return round_to_bfloat16(exp2_weight(low), exp2_weight(high));
}

inline __m512 add_weights(__m512 sum, __m512i weights) {
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  return _mm512_dpbf16_ps(sum, (__m512bh)weights, ones);
}

// The weights of sixteen rows and their sums. REQUIRES: masked scores are -inf
__attribute__((noinline)) inline void weigh_sixteen(const float* scores, KeyRange steps, float factor,
                                                    const float* shift, BFloat16* weights, float* sums) {
  const __m512 by = _mm512_set1_ps(factor);
  __m512 sum[16];
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r) sum[r] = _mm512_setzero_ps();
  for (int step = steps.begin; step < steps.end; ++step)
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) {
      const __m512i pair = weights_of(scores + 2 * step * kTileFloats + 16 * r, by, shift[r]);
      _mm512_store_si512(weights + step * kTileHalves + 32 * r, pair);
      sum[r] = add_weights(sum[r], pair);
    }
  for (int r = 0; r < 16; ++r) sums[r] = reduce_add((VecF)sum[r]);
}

// The same of one row, the weights as float32 in place of the scores; their sum.
inline float weigh_in_place(float* scores, KeyRange steps, float factor, float shift) {
  const __m512 by = _mm512_set1_ps(factor);
  __m512 sum = _mm512_setzero_ps();
#pragma GCC unroll 4
  for (int step = steps.begin; step < steps.end; ++step) {
    float* at = scores + 2 * step * kTileFloats;
    const __m512i pair = weights_of(at, by, shift);
    alignas(64) BFloat16 rounded[kStep];
    _mm512_store_si512(rounded, pair);
    store(at, load(rounded));
    store(at + kTileFloats, load(rounded + kLanes));
    sum = add_weights(sum, pair);
  }
  return reduce_add((VecF)sum);
}

// o [R, C * kLanes], rows o_stride apart = weights · values, from `offset` behind the keys on. `after`: what
// is read when the last tile's values have been.
template <int R, int C, class T>
inline void weigh_columns_in_place(const float* weights, const KeyRows<T>* tiles, int64_t offset,
                                   KeyRange steps, NextRows<T> after, float* o, int64_t o_stride) {
  VecF sum[R][C] = {};
  // Unrolled by order: the compiler would keep the sums in memory as well.
  const auto each = [](auto f) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) f(r, c);
  };
  for (int step = steps.begin; step < steps.end; ++step) {
    const T* const* at = tiles[step / 2].at + step % 2 * kStep;
    const bool last = step / 2 == (steps.end - 1) / 2;
    const T* const* next = last ? after.at + step % 2 * kStep : at + kKeyTile;
    const int64_t next_offset = last ? after.offset : offset;
    const float* w = weights + 2 * step * kTileFloats;
    VecF even[R][C], odd[R][C];
    each([&](int r, int c) { even[r][c] = odd[r][c] = VecF{}; });
    for (int k = 0; k < kStep; k += 2) {
      const float* pair = w + k / 16 * kTileFloats + k % 16;
      VecF v[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) v[c] = load_rounded(at[k] + offset + c * kLanes);
      each([&](int r, int c) { even[r][c] += broadcast(pair[16 * r]) * v[c]; });
      for (int byte = 0; byte < C * kLanes * int{sizeof(T)}; byte += 64) {
        fetch_ahead(reinterpret_cast<const char*>(next[k] + next_offset) + byte);
        fetch_ahead(reinterpret_cast<const char*>(next[k + 1] + next_offset) + byte);
      }
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) v[c] = load_rounded(at[k + 1] + offset + c * kLanes);
      each([&](int r, int c) { odd[r][c] += broadcast(pair[16 * r + 1]) * v[c]; });
    }
    each([&](int r, int c) { sum[r][c] += even[r][c] + odd[r][c]; });
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(o + r * o_stride + c * kLanes, sum[r][c]);
}

// Subnormal numbers count as zero while it lives, as they always do for the matrix unit.
class WithoutSubnormals {
 public:
  WithoutSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~WithoutSubnormals() { _mm_setcsr(before_); }
  WithoutSubnormals(const WithoutSubnormals&) = delete;
  WithoutSubnormals& operator=(const WithoutSubnormals&) = delete;

 private:
  const unsigned before_;
};

// o [R, D] = weights · values, where these lie: packing would cost more than a few rows save.
// REQUIRES: kLanes divides D
template <int R, class T>
inline void weigh_values_in_place(const float* weights, const KeyRows<T>* tiles, int64_t values_after_keys,
                                  KeyRange steps, const KeyRows<T>& after, int dim, float* o) {
  constexpr int kWide = R <= 2 ? 4 : R <= 4 ? 2 : 1;  // twice as many sums fit the registers
  int d = 0;
  for (; d + kWide * kLanes <= dim; d += kWide * kLanes)
    weigh_columns_in_place<R, kWide>(weights, tiles, values_after_keys + d, steps, {after.at, d}, o + d, dim);
  for (; d < dim; d += kLanes)
    weigh_columns_in_place<R, 1>(weights, tiles, values_after_keys + d, steps, {after.at, d}, o + d, dim);
}

}  // namespace bequest::amx
