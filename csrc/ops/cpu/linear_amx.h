// Products of bfloat16 by the chip's matrix units, over weights in tiles (ops/cpu/linear.h). The rows of x
// are rounded to bfloat16 once per product, into tiles of their own:
//
//   [ceil(T / 16), ceil(K / 32), R, 32]    R = 16 rows in a tile, or T where there are fewer; zeros past K
//
// Each output is one chain of tile products over k = 0, 32, 64, …, started at zero, in float32; a part of the
// chain may be stored and taken up again. So here too bits depend on a row of x and one of the weight alone.
#pragma once

#include <cstdint>

#include "cache/kv_layout.h"
#include "core/dtype.h"
#include "ops/cpu/feed_forward.h"
#include "ops/cpu/linear.h"
#include "ops/hidden_tap.h"

namespace bequest {

// linear() for WeightFormat::kTiles. Throws on a chip without matrix units, as does the next one.
void linear_amx(const LinearParams& p);

// feed_forward() over tiles: the inner values go from one product to the other in tiles, and where rows are
// many, in blocks of rows that stay in a core's L2.
void feed_forward_amx(const FeedForwardParams& p);

// A norm that a product begins with: its rows are those of residual + x, normed. The residual has the sum
// then.
struct RowNorm {
  float* residual;      // [T, K], contiguous
  const float* weight;  // [K]
  const float* bias;    // [K] of a layer norm; null: a root-mean-square norm
  float eps;
  HiddenTap tap;

  RowNorm from(int64_t row, int64_t width) const {
    HiddenTap rest = tap;
    if (tap.ring_rows != nullptr) rest.ring_rows += row, rest.layers += 2 * row;
    return {residual + row * width, weight, bias, eps, rest};
  }
};

// To the bit, a norm (ops/cpu/norm.h) and linear() or feed_forward() over tiles, without storing what is
// between them. REQUIRES: rows of x are contiguous. The result of a feed-forward layer may take the place of
// x.
void normed_linear(const LinearParams& p, const RowNorm& norm);
void normed_feed_forward(const FeedForwardParams& p, const RowNorm& norm);

// Columns of a product that are keys and values of the rows, and go to the cache in bfloat16.
struct KvColumns {
  int64_t first;  // the keys' first one, then the values'; columns before it are the output's, which has no
                  // others
  BFloat16* kv_cache;  // [NB, L, 2, NKV, BS, D]
  KvLayout layout;     // REQUIRES: 32 divides `first` and D
  int64_t layer;
  const int64_t* slots;  // [T], -1: the row is not stored
};

// linear() over tiles with such columns: what linear() and write_kv() give. Throws before anything is written
// if a slot is outside the cache.
void linear_into_cache(const LinearParams& p, const KvColumns& kv, const RowNorm* norm = nullptr);
// Whether a product over `format` can do so, `first` columns before the keys.
inline bool can_store_in_cache(WeightFormat format, DType kv_dtype, int64_t first, int64_t head_dim) {
  return format == WeightFormat::kTiles && kv_dtype == DType::kBF16 && first % kStripWidth == 0 &&
         head_dim % kStripWidth == 0;
}

struct TiledProduct {
  LinearParams params;
  BFloat16* rows;   // x in tiles
  BFloat16* inner;  // the tiles of a product that follows, which then has the results instead of params.out;
                    // or null
  const KvColumns* kv = nullptr;  // where some columns go instead
  const RowNorm* norm = nullptr;  // of x

  int64_t rows_in_tile() const { return params.num_tokens < kTileSide ? params.num_tokens : kTileSide; }
  int64_t row_tiles() const { return (params.num_tokens + kTileSide - 1) / kTileSide; }
  int64_t k_tiles() const { return num_k_tiles(params.in_features); }
  int64_t row_bytes() const {
    return row_tiles() * k_tiles() * rows_in_tile() * kTileDepth * int64_t{sizeof(BFloat16)};
  }
  // Strips that items are made of: those of a gate stand for those of the other half too.
  int64_t strips() const { return num_strips(params.out_features) / (params.gated() ? 2 : 1); }
};

// What one thread multiplies: some strips of columns for a block of row tiles.
struct TiledItem {
  int64_t row_begin, row_end;      // tiles, at most kItemRowTiles
  int64_t strip_begin, strip_end;  // at most kItemStrips, both halves of a gated product counted
};

inline constexpr int64_t kItemRowTiles = 16;
inline constexpr int64_t kItemStrips = 8;
// A thread's memory for the sums of an item.
inline constexpr int64_t kItemSumBytes =
    kItemStrips * kItemRowTiles * 2 * kTileSide * kTileSide * int64_t{sizeof(float)};

namespace amx {

// Writes tiles [begin, end) of the rows.
void round_rows(const TiledProduct& product, int64_t begin, int64_t end);
// Writes one row of the tiles from row [K], or zeros if that is null.
void round_row(const TiledProduct& product, int64_t row, const float* from);
// sums: kItemSumBytes at a multiple of 64.
void multiply_strips(const TiledProduct& product, const TiledItem& item, float* sums);

}  // namespace amx
}  // namespace bequest
