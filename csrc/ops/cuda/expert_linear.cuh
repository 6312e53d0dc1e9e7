// What the kernels of expert_linear share.
#pragma once

#include "ops/cuda/expert_linear.h"

namespace bequest::cuda {

// Of every pair: f(gate) * up, or the product as it is.
struct ExpertProduct {
  const void* x;  // [T, D] if the pairs of a token share a row, else [T * K, D]
  ExpertMatrices matrices;
  ExpertChoice choice;
  bool gated;
  bool shares_rows;
  Activation activation;  // of a gated one
  void* out;              // [T * K, outputs()]

  constexpr int64_t outputs() const { return gated ? matrices.out_features / 2 : matrices.out_features; }
};

// Any sizes, any chip; bfloat16 in multiples of 8 on Hopper. The arguments have been checked, T >= 1.
void multiply_rows(const ExpertProduct& p, Stream stream);
void multiply_tiles(const ExpertProduct& p, Stream stream);

}  // namespace bequest::cuda
