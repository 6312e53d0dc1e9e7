// out = x · weightᵀ + bias over a packed weight.
//
// A weight [N, K] is packed once into panels of 16 output columns, [ceil(N / 16), K, 16], padded with zeros:
// one step of k reads one contiguous row of a panel, whatever the width of the vectors.
//
// Chips with matrix units multiply bfloat16 in tiles instead (ops/cpu/linear_amx.h). A weight for them is
// packed into strips of 32 output columns, [ceil(N / 32), ceil(K / 32), 2, 16, 16, 2], padded with zeros: per
// 32 values of k two tiles of 16 columns, in which a row has a pair of k for each column.
//
// Every output element is one chain of fused multiply-adds over k = 0 … K-1, started at zero, the bias added
// last. So its bits depend on its row of x and its row of the weight alone: not on T, on the place of the row
// in the batch, or on the number of threads. Continuing a sequence, preempting it or running it in a crowd
// cannot change a token.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "ops/activation.h"

namespace bequest {

inline constexpr int64_t kPanelWidth = 16;

// How a packed weight is stored and multiplied; ops/cpu/quantised.h has the codes, and kTiles are of
// bfloat16. Codes are multiplied as the float32 values that they stand for, or, where kFast is added, as
// integers (ops/cpu/linear_integer.h).
enum class WeightFormat : int {
  kF32 = 0,
  kBF16 = 1,
  kTiles = 2,
  kQ4 = 3,
  kQ8 = 4,
  kK4 = 5,
  kK5 = 6,
  kK6 = 7,
  kFast = 16
};

constexpr bool is_fast(WeightFormat format) { return (int(format) & int(WeightFormat::kFast)) != 0; }
constexpr WeightFormat exact_of(WeightFormat format) {
  return WeightFormat(int(format) & ~int(WeightFormat::kFast));
}
constexpr bool is_codes(WeightFormat format) { return exact_of(format) >= WeightFormat::kQ4; }

inline constexpr int64_t kStripWidth = 2 * kPanelWidth;
inline constexpr int64_t kTileSide = 16;   // rows of a tile, and columns of float32 or pairs of bfloat16
inline constexpr int64_t kTileDepth = 32;  // values of k in a tile of a weight
inline constexpr int64_t kTileValues = kTileSide * kTileDepth;

inline int64_t num_strips(int64_t out_features) { return (out_features + kStripWidth - 1) / kStripWidth; }
inline int64_t num_k_tiles(int64_t in_features) { return (in_features + kTileDepth - 1) / kTileDepth; }

// The place of a value in a weight of tiles: that of its column at k = 0, and from there on.
inline int64_t tiled_column(int64_t column, int64_t in_features) {
  const int64_t strip = column / kStripWidth, panel = column / kPanelWidth % 2;
  return (strip * num_k_tiles(in_features) * 2 + panel) * kTileValues + column % kPanelWidth * 2;
}
inline int64_t tiled_depth(int64_t k) {
  return k / kTileDepth * 2 * kTileValues + k % kTileDepth / 2 * kTileDepth + k % 2;
}

inline int64_t num_panels(int64_t out_features) { return (out_features + kPanelWidth - 1) / kPanelWidth; }

// Whether a product with it can write f(gate) * up: columns of each half are whole panels or strips.
inline bool can_gate(WeightFormat format, int64_t out_features) {
  const bool tiles = format == WeightFormat::kTiles;
  return (tiles || is_codes(format)) && out_features % (2 * (tiles ? kStripWidth : kPanelWidth)) == 0;
}

struct PackParams {
  const void* weight;  // [rows, K], contiguous
  DType weight_dtype;
  void* packed;         // [ceil(N / 16), K, 16], or tiles
  WeightFormat format;  // of numbers
  int64_t first_row;    // the row of the packed weight that row 0 becomes
  int64_t rows;
  int64_t in_features;  // K
};

// Writes rows [first_row, first_row + rows) of the packed weight; the padding is the caller's.
// REQUIRES: first_row + rows <= N, K >= 1; no concurrent call writes to the same panel.
void pack_weight(const PackParams& p);

// What is written of the sums: themselves; f of them; or, where the first half of the columns are a gate and
// the others what it lets through, f(gate) * up alone: out is [T, N / 2]. Over tiles f is that of
// ops/cpu/quick_activations.h.
enum class Finish { kSum, kActivated, kGated };

struct LinearParams {
  const float* x;      // [T, K], rows x_stride apart; they may overlap
  const void* weight;  // [ceil(N / 16), K, 16], or groups of codes, or tiles
  WeightFormat format;
  const float* bias;  // [N], or null
  float* out;         // [T, N], contiguous
  int64_t num_tokens;
  int64_t out_features;  // N
  int64_t in_features;   // K
  int64_t x_stride;      // elements
  Finish finish = Finish::kSum;
  Activation activation = Activation::kSilu;  // where the finish has one

  bool gated() const { return finish == Finish::kGated; }
};

// REQUIRES: N >= 1, K >= 1; out overlaps nothing else. A gated product is over codes or tiles, and the
// columns of each half are whole panels of codes or strips of tiles; an activated one is over tiles.
void linear(const LinearParams& p);

}  // namespace bequest
