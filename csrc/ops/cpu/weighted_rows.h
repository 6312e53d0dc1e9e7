// Sums of rows, each times a number.
#pragma once

#include <cstdint>

namespace bequest {

struct WeightedRowsParams {
  const float* rows;      // [R, H], contiguous
  const int32_t* places;  // [T, K]: which rows are a token's; null: they lie in this order
  const float* weights;   // [T, K]
  float* out;             // [T, H], contiguous
  int64_t num_tokens;
  int64_t per_token;  // K
  int64_t width;      // H
  bool adds;          // to what out has
};

// out = w0 row0 + w1 row1 + …, in this order: a chain of fused multiply-adds from zero, or from out.
// REQUIRES: places are in [0, R); out overlaps nothing else.
void add_weighted_rows(const WeightedRowsParams& p);

// out [n] = sigmoid(x)
void make_gates(const float* x, float* out, int64_t n);

}  // namespace bequest
