// How one worker's memory is divided while it attends in tiles of bfloat16.
#pragma once

#include <cstdint>

#include "attention/cpu/plan.h"
#include "attention/cpu/scratch.h"
#include "core/dtype.h"

namespace bequest {

// Rows that are scored, weighed and multiplied together: two tiles, so that a tile of keys or values is
// loaded once for both.
inline constexpr int kAmxRows = 32;

// Tiles lie one after another, 1 KiB each, as the unit loads them (core/amx_tiles.h).
struct AmxScratch {
  BFloat16* q;        // [rows / 16, D / 32] tiles of 16 rows × 32 of D
  BFloat16* keys;     // [kSplit / 16, D / 32] tiles of 16 pairs along D × 16 keys
  BFloat16* values;   // [kSplit / 32, D / 16] tiles of 16 pairs of keys × 16 of D
  float* scores;      // [2, kSplit / 16] tiles of 16 rows × 16 keys
  BFloat16* weights;  // [2, kSplit / 32] tiles of 16 rows × 32 keys
  float* o;           // [kAmxRows, D]
  float* split;       // StateRows of the running split
  float* total;       // StateRows of the splits before it

  // D rounded up to the depth of a product: what is beyond D is zero.
  static constexpr int64_t tiled_dim(int64_t dim) { return (dim + 31) / 32 * 32; }

  AmxScratch(float* base, int64_t rows, int64_t dim, int64_t padded_dim) {
    const int64_t tiled = tiled_dim(dim);
    float* at = base + (64 - reinterpret_cast<uintptr_t>(base) % 64) / sizeof(float);
    const auto take = [&at](int64_t floats) {
      float* const taken = at;
      at += floats;
      return taken;
    };
    q = reinterpret_cast<BFloat16*>(take(tiled_rows(rows) * tiled / 2));
    keys = reinterpret_cast<BFloat16*>(take(kSplit * tiled / 2));
    values = reinterpret_cast<BFloat16*>(take(kSplit * tiled / 2));
    scores = take(kAmxRows * kSplit);
    weights = reinterpret_cast<BFloat16*>(take(kAmxRows * kSplit / 2));
    o = take(kAmxRows * tiled);
    split = take(rows * (padded_dim + 2));
    total = take(rows * (padded_dim + 2));
  }

  static int64_t floats(int64_t rows, int64_t dim, int64_t padded_dim) {
    const int64_t tiled = tiled_dim(dim);
    return 16 + tiled_rows(rows) * tiled / 2 + kSplit * tiled + kAmxRows * kSplit * 3 / 2 + kAmxRows * tiled +
           2 * rows * (padded_dim + 2);
  }

 private:
  static constexpr int64_t tiled_rows(int64_t rows) { return (rows + kAmxRows - 1) / kAmxRows * kAmxRows; }
};

}  // namespace bequest
