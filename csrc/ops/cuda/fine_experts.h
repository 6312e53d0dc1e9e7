// Products of experts in codes by warpgroups, where experts get many rows: a part of fine_linear.h.
#pragma once

#include "ops/cuda/fine_linear.h"

namespace bequest::cuda {

inline constexpr float kBesideCodes = 1.0f / 16;  // of x in float16, as in the chain

struct FineTilesParams {
  FineLinearParams p;  // halves are permuted; a gated product has outputs [T * K, N / 2]
  ExpertChoice choice;
  bool shares_rows;  // the pairs of a token read one row of x
  bool gated;        // of each expert the rows of the gate and then those of up
  Activation activation;
};

// REQUIRES: has_fine_expert_tiles
void fine_expert_tiles(const FineTilesParams& t, Stream stream);

}  // namespace bequest::cuda
