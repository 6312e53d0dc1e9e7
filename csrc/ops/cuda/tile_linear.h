// y = x Wᵀ + b for the rows of a batch of streams (5 to 128), where reading W is most of the work. W is in
// bfloat16, in e4m3 or in codes of 4 bits: one kernel, with the format as a part of it. A norm before the
// product and what a layer does with the result can be part of it, too.
#pragma once

#include <cstdint>

#include "ops/cuda/skinny_linear.h"

namespace bequest::cuda {

inline constexpr int kMostTileRows = 128;

enum class TileFormat { kBFloat16, kFloat8, kInt4 };

struct TileLinearParams {
  const void* x;       // [T, K] bfloat16, contiguous, aligned to 16 bytes
  const void* weight;  // [N, K] in the format, contiguous, aligned to 16 bytes; kInt4 as int4_to_f16 takes it
  const void* bias;    // [N] bfloat16, or null
  void* out;           // [T, N] bfloat16; kGate: [T, N / 2]
  int num_tokens;      // T
  int64_t out_features;
  int64_t in_features;
  SkinnyResult result = SkinnyResult::kStore;
  Activation activation = Activation::kSilu;  // of kGate
  // Of kFloat8: [N] float32, what each row is multiplied by. Of kInt4: [N, pitch] words, see CodeGroup.
  const void* scales = nullptr;
  int64_t pitch = 0;
  // Of a root-mean-square norm of x before the product; null: none. Not of kInt4.
  const void* norm_weight = nullptr;  // [K] bfloat16, aligned to 16 bytes
  float eps = 0;
  HiddenTap tap = {};  // of x as it is before the norm; not `store_output`
};

// How the work is divided. A row's result depends on it, and not on the other rows.
struct TilePlan {
  int row_groups;  // of 64 rows of W (of 32 beyond 64 tokens), in a CTA
  int splits;      // of k, to the CTAs of a cluster
  int stages;      // of the ring
};

}  // namespace bequest::cuda
