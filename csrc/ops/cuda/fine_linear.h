// y = x Wᵀ + b with W in codes with fine scales (fine_codes.h): of one matrix, or of an expert for each row.
#pragma once

#include "device/stream.h"
#include "ops/cuda/expert_linear.h"
#include "ops/cuda/fine_codes.h"

namespace bequest::cuda {

inline constexpr int kMostFineTokens = 64;  // of one tile: what is more is multiplied tile by tile

struct FineLinearParams {
  const void* x;          // [rows of x, K] bfloat16, contiguous, aligned to 16 bytes
  void* halves;           // [rows of x, K] float16: scratch, aligned to 16 bytes
  FineMatrices matrices;  // one, or those of all experts
  const void* bias;       // [N] bfloat16; of experts [E, N] float32; or null
  void* out;              // [rows, N] bfloat16
  float* parts;           // [fine_splits, rows, N]: scratch where there are several
  int64_t num_rows;       // T; of experts pairs, T * top_k
};

// Pieces of k that are summed apart, so that there is work for all multiprocessors.
int64_t fine_splits(int64_t out_features, int64_t in_features);

// A row's result depends on the row alone. REQUIRES: one matrix
void fine_linear(const FineLinearParams& p, Stream stream);

// Of each pair the product with its expert's matrix; `shared`: a token's pairs read one row of x, [T, K],
// else each has its own, [T * top_k, K]. Rows of pairs that are in no run may be left as they are.
void fine_expert_linear(const FineLinearParams& p, const ExpertChoice& choice, bool shared, Stream stream);

// Whether as many rows are multiplied by warpgroups, which can gate them, too.
bool has_fine_expert_tiles(const FineMatrices& m, const ExpertSizes& sizes);

// Of each pair f(gate) * up of the product with its expert's matrix, whose rows are those of the gate, then
// of up; a token's pairs read one row of x. REQUIRES: has_fine_expert_tiles
void fine_expert_gated(const FineLinearParams& p, const ExpertChoice& choice, Activation activation,
                       Stream stream);

}  // namespace bequest::cuda
