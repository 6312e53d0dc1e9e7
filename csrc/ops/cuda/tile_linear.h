// Products of the rows of a batch of streams (skinny_linear.h, 5 to 128 rows), in tiles. W is in bfloat16, in
// e4m3 or in codes of 4 bits: one kernel, with the format as a part of it. For Hopper alone.
#pragma once

#include <cstdint>

#include "ops/cuda/skinny_linear.h"

namespace bequest::cuda {

inline constexpr int kMostTileTokens = 128;
inline constexpr int kTileDepthUnit = 64;  // of K; of codes of 4 bits 128

// How a product is divided. A row's result depends on it, and not on the other rows.
struct TilePlan {
  int row_groups;  // 1, 2 or 4 times 64 rows of W, of a CTA
  int splits;      // of k, among the CTAs of a cluster: 1 to 8
};

// REQUIRES: 1 <= T <= kMostTileTokens; N is even, N / 2 of a gate, too; K is a multiple of its unit
void tile_linear(const SkinnyLinearParams& p, const TilePlan& plan, Stream stream);

}  // namespace bequest::cuda
