// Products of experts in codes by warpgroups, where experts get many rows: a part of fine_linear.h.
#pragma once

#include "ops/cuda/fine_linear.h"

namespace bequest::cuda {

inline constexpr float kBesideCodes = 1.0f / 16;  // of x in float16, as in the chain

// Whether there are such products of these sizes on this chip, for as many rows.
bool has_fine_expert_tiles(const FineMatrices& m, const ExpertSizes& sizes);

// As fine_expert_linear. REQUIRES: has_fine_expert_tiles; p.halves are permuted
void fine_expert_tiles(const FineLinearParams& p, const ExpertChoice& choice, bool shared, Stream stream);

}  // namespace bequest::cuda
