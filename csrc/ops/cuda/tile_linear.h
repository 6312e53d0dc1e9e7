// Products of the rows of a batch of streams (skinny_linear.h), in tiles. W is in bfloat16, in e4m3 or in
// codes of 4 bits: one kernel, with the format as a part of it. For Hopper alone.
#pragma once

#include <cstdint>

#include "ops/cuda/skinny_linear.h"

namespace bequest::cuda {

// What is multiplied: W, and x where it is not in bfloat16.
enum class TileFormat : int { kBFloat16 = 0, kFloat8 = 1, kFloat8Rows = 2, kInt4 = 3 };

// How a product is divided. A row's result depends on it, and not on the other rows.
struct TilePlan {
  int rows;    // of W, of a CTA: 64, 128 or 256; of kFloat8Rows 64, 96, 128, 144, 192 or 224
  int splits;  // of k, among the CTAs of a cluster: 1 to 8, of kFloat8Rows to 4
};

// Whether tiles are the fastest way to multiply T rows with a weight [N, K], and can be: by the figures of
// docs/kernels_ops.md.
bool is_tile_product(int64_t num_tokens, int64_t out_features, int64_t in_features, TileFormat format);

// Of kInt4 the plan depends on T by whether there are more than 32, 64 and 128, and then on how many times
// 128. That of the others does not.
TilePlan tile_plan(int64_t num_tokens, int64_t out_features, int64_t in_features, TileFormat format);

// A norm is one that the product before has left rows and squares for (NormAhead). Throws where a plan that
// is none of tile_plan's leaves no room for a ring. REQUIRES: norms of kBFloat16 alone; N is even, of a gate
// a multiple of 4, where something is left of 8; K is a multiple of 64, of kFloat8Rows and kInt4 of 128
void tile_linear(const SkinnyLinearParams& p, const TilePlan& plan, Stream stream);

// Of what is to be multiplied.
inline TileFormat tile_format(const SkinnyLinearParams& p) {
  if (p.groups != nullptr) return TileFormat::kInt4;
  if (p.scales == nullptr) return TileFormat::kBFloat16;
  return p.x_scales != nullptr ? TileFormat::kFloat8Rows : TileFormat::kFloat8;
}

}  // namespace bequest::cuda
