// out = x · weightᵀ + bias over a packed weight.
//
// A weight [N, K] is packed once into panels of 16 output columns, [ceil(N / 16), K, 16], padded with zeros:
// one step of k reads one contiguous row of a panel, whatever the width of the vectors.
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

// How a packed weight is stored; ops/quantised.h has the last two.
enum class WeightFormat : int { kF32 = 0, kBF16 = 1, kQ4 = 2, kQ8 = 3 };

inline int64_t num_panels(int64_t out_features) { return (out_features + kPanelWidth - 1) / kPanelWidth; }

struct PackParams {
  const void* weight;  // [rows, K], contiguous
  DType weight_dtype;
  void* packed;  // [ceil(N / 16), K, 16]
  DType packed_dtype;
  int64_t first_row;  // the row of the packed weight that row 0 becomes
  int64_t rows;
  int64_t in_features;  // K
};

// Writes rows [first_row, first_row + rows) of the packed weight; the padding is the caller's.
// REQUIRES: first_row + rows <= N, K >= 1; no concurrent call writes to the same panel.
void pack_weight(const PackParams& p);

struct LinearParams {
  const float* x;      // [T, K], contiguous
  const void* weight;  // [ceil(N / 16), K, 16], or groups of codes
  WeightFormat format;
  const float* bias;  // [N], or null
  float* out;         // [T, N], contiguous
  int64_t num_tokens;
  int64_t out_features;  // N
  int64_t in_features;   // K
  // The first half of the columns are a gate, the others what it lets through, and only f(gate) * up is
  // written: out is [T, N / 2].
  bool gated = false;
  Activation activation = Activation::kSilu;
};

// REQUIRES: N >= 1, K >= 1; out overlaps nothing else. A gated product is over codes, and 32 divides N.
void linear(const LinearParams& p);

}  // namespace bequest
