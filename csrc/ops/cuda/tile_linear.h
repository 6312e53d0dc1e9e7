// Products of the rows of a batch of streams (skinny_linear.h, 5 to 128 rows), in tiles. W is in bfloat16, in
// e4m3 or in codes of 4 bits: one kernel, with the format as a part of it. For Hopper alone.
#pragma once

#include <cstdint>

#include "ops/cuda/skinny_linear.h"

namespace bequest::cuda {

// How a product is divided. A row's result depends on it, and not on the other rows.
struct TilePlan {
  int row_groups;  // 1, 2 or 4 times 64 rows of W, of a CTA
  int splits;      // of k, among the CTAs of a cluster: 1 to 8
};

// Whether tiles are the fastest way to multiply T rows with a weight [N, K] of so many bits, and can be: by
// the figures of docs/kernels_ops.md. `normed`: with a norm in front.
bool is_tile_product(int64_t num_tokens, int64_t out_features, int64_t in_features, int bits, bool normed);

// The plan depends on T by whether there are more than 32 and more than 64.
TilePlan tile_plan(int64_t num_tokens, int64_t out_features, int64_t in_features);

// REQUIRES: up to 32 rows of bfloat16, 64 of e4m3, 128 of codes of 4 bits; a norm of bfloat16 alone; N is
// even, of a gate a multiple of 4; K is a multiple of 64, of codes of 4 bits of 128
void tile_linear(const SkinnyLinearParams& p, const TilePlan& plan, Stream stream);

}  // namespace bequest::cuda
