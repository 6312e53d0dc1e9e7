// Root-mean-square norms in the order of Hugging Face's Llama: normalise in float32, then times the weight.
// A row's result depends on the row alone.
#pragma once

#include <cstdint>

#include "ops/hidden_tap.h"

namespace bequest {

struct RmsNormParams {
  const float* x;       // [T, H], contiguous
  float* residual;      // [T, H], contiguous, or null: residual += x, and the residual is what is normalised
  const float* weight;  // [H]
  float* out;           // [T, H], contiguous; may be x
  int64_t num_tokens;
  int64_t hidden;
  float eps;
  HiddenTap tap;  // of floats
};

// REQUIRES: H >= 1; out does not overlap the residual.
void rms_norm(const RmsNormParams& p);

struct LayerNormParams {
  const float* x;       // [T, H], contiguous
  float* residual;      // [T, H], contiguous, or null: residual += x, and the residual is what is normalised
  const float* weight;  // [H]
  const float* bias;    // [H]
  float* out;           // [T, H], contiguous; may be x
  int64_t num_tokens;
  int64_t hidden;
  float eps;
  HiddenTap tap;  // of floats
};

// (x - mean) / deviation * weight + bias. REQUIRES: H >= 1; out does not overlap the residual.
void layer_norm(const LayerNormParams& p);

struct HeadRmsNormParams {
  float* x;             // [T, heads, D], normalised in place over D; heads are contiguous
  int64_t row_stride;   // floats from one token to the next
  const float* weight;  // [D]
  int64_t num_tokens;
  int64_t num_heads;
  int64_t head_dim;
  float eps;
};

// REQUIRES: D >= 1, row_stride >= heads * D.
void head_rms_norm(const HeadRmsNormParams& p);

}  // namespace bequest
