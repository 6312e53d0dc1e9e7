// y = x Wᵀ + b for a few rows of x: reading W is all the work.
#pragma once

#include <cstdint>

#include "core/stream.h"

namespace bequest::cuda {

inline constexpr int kMostSkinnyRows = 32;
inline constexpr int kSkinnyDepthUnit = 256;  // 32 accesses of 8 bfloat16

struct SkinnyLinearParams {
  const void* x;       // [T, K] bfloat16, contiguous, aligned to 16 bytes
  const void* weight;  // [N, K] bfloat16, contiguous, aligned to 16 bytes
  const void* bias;    // [N] bfloat16, or null
  void* out;           // [T, N] bfloat16
  int num_tokens;      // T
  int64_t out_features;
  int64_t in_features;
};

// A row's result depends on the row alone, and on whether there are more than four. REQUIRES: 1 <= T <=
// kMostSkinnyRows; K is a multiple of kSkinnyDepthUnit.
void skinny_linear(const SkinnyLinearParams& p, Stream stream);

}  // namespace bequest::cuda
