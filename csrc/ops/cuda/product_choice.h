// Who multiplies a few bfloat16 rows [T, K] with a weight [N, K]: our kernels (skinny_linear.h) or cuBLAS.
//
// A large weight keeps cuBLAS busy enough from few rows on. Beyond the rows that can be fused it is slower
// only where there are few outputs.
#pragma once

#include <cstdint>

#include "ops/cuda/skinny_linear.h"

namespace bequest::cuda {

inline constexpr int64_t kSmallWeight = 8 << 20;  // elements
inline constexpr int64_t kNarrowOutputs = 2048;

// Whether the product is ours with what can be fused with it; `normed`: with a norm in front.
inline bool is_fused_product(int64_t num_tokens, int64_t out_features, int64_t in_features, bool normed) {
  const int64_t most = out_features * in_features <= kSmallWeight ? kMostFusedRows : kMostStreamedRows;
  if (num_tokens < 1 || num_tokens > most || in_features % kSkinnyDepthUnit != 0) return false;
  return !normed || skinny_linear_norms(static_cast<int>(num_tokens), in_features);
}

// Whether a plain product is ours.
inline bool is_skinny_product(int64_t num_tokens, int64_t out_features, int64_t in_features) {
  if (is_fused_product(num_tokens, out_features, in_features, false)) return true;
  const bool narrow = out_features < kNarrowOutputs && out_features * in_features <= kSmallWeight;
  return num_tokens > kMostFusedRows && num_tokens <= kMostSkinnyRows && narrow &&
         in_features % kSkinnyDepthUnit == 0;
}

}  // namespace bequest::cuda
