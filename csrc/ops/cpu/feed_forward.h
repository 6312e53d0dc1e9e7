// The two products of a feed-forward layer and the activation between them, without storing what is between
// them in full precision.
#pragma once

#include <cstdint>

#include "ops/activation.h"

namespace bequest {

struct FeedForwardParams {
  const float* x;          // [T, K], contiguous
  const void* up;          // [I, K], or gate and up [2 I, K], in tiles (ops/cpu/linear.h)
  const float* up_bias;    // [I] or [2 I], or null
  const void* down;        // [N, I] in tiles
  const float* down_bias;  // [N], or null
  float* out;              // [T, N], contiguous
  int64_t num_tokens;      // T
  int64_t in_features;     // K
  int64_t inner_features;  // I
  int64_t out_features;    // N
  Activation activation;
  bool gated;
};

// out = down · f(up · x), or down · (f(gate · x) * (up · x)), to the bit what two calls of linear() give.
// REQUIRES: out overlaps nothing else; if gated, 32 divides I. Throws on a chip without matrix units.
void feed_forward(const FeedForwardParams& p);

}  // namespace bequest
