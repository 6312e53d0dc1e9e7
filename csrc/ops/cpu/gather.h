// Rows of a packed weight: with tied embeddings the matrix of the output layer is stored once and serves
// both.
#pragma once

#include <cstdint>

#include "ops/cpu/linear.h"

namespace bequest {

struct GatherParams {
  const int32_t* ids;  // [T], in [0, N)
  const void* weight;  // [ceil(N / 16), K, 16], or as ops/cpu/linear.h says
  WeightFormat format;
  float* out;  // [T, K], contiguous
  int64_t num_tokens;
  int64_t out_features;  // N
  int64_t in_features;   // K
};

// Throws on an id outside the weight, before anything is written.
void gather_rows(const GatherParams& p);

}  // namespace bequest
