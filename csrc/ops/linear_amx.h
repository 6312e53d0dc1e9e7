// Products of bfloat16 by the chip's matrix units, over weights in tiles (ops/linear.h). The rows of x are
// rounded to bfloat16 once per product, into tiles of their own:
//
//   [ceil(T / 16), ceil(K / 32), R, 32]    R = 16 rows in a tile, or T where there are fewer; zeros past T
//   and K
//
// Each output is one chain of tile products over k = 0, 32, 64, …, started at zero, in float32; a part of the
// chain may be stored and taken up again. So here too bits depend on a row of x and one of the weight alone.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "ops/linear.h"

namespace bequest {

// linear() for WeightFormat::kTiles. Throws on a chip without matrix units.
void linear_amx(const LinearParams& p);

struct TiledProduct {
  const LinearParams& params;
  int64_t rows_in_tile;  // R
  int64_t row_tiles;
  int64_t k_tiles;
  BFloat16* rows;  // x in tiles
};

// What one thread multiplies: some strips of columns for a block of row tiles. Of a gated product these are
// strips of the gate, and as many of the other half.
struct TiledItem {
  int64_t row_begin, row_end;  // tiles
  int64_t strip_begin, strip_end;
};

inline constexpr int64_t kItemRowTiles = 16;  // at most: their values of some K stay in L2
// A thread's memory for the sums of a strip and of the one that it gates.
inline constexpr int64_t kItemSumBytes = kItemRowTiles * 4 * kTileSide * kTileSide * int64_t{sizeof(float)};

namespace amx {

// Writes tiles [begin, end) of the rows.
void round_rows(const TiledProduct& product, int64_t begin, int64_t end);
// sums: kItemSumBytes at a multiple of 64.
void multiply_strips(const TiledProduct& product, const TiledItem& item, float* sums);

}  // namespace amx
}  // namespace bequest
