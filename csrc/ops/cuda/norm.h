// Norms on the device, with the residual's addition and the hidden-state tap in the same pass. A row's result
// depends on the row alone, to the bit.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "device/stream.h"
#include "ops/cuda/float8_rows.h"
#include "ops/hidden_tap.h"

namespace bequest::cuda {

struct RmsNormParams {
  const void* x;       // [T, H], rows `stride` apart
  void* residual;      // [T, H], contiguous, or null: residual += x, and the residual is what is normalised
  const void* weight;  // [H]
  float offset;        // added to the weight, in float32
  void* out;           // [T, H], rows `stride` apart; may be x; null: codes are the result
  DType dtype;         // of all of them
  int64_t num_tokens;
  int64_t hidden;
  int64_t stride;  // elements
  float eps;
  HiddenTap tap;
  Float8Rows codes = {};  // where the result goes instead of `out`, rounded once more
};

// Throws on H > 8192, in bf16 with H a multiple of 8 on H > 16384. REQUIRES: out does not overlap the
// residual.
void rms_norm(const RmsNormParams& p, Stream stream);

struct LayerNormParams {
  const void* x;       // [T, H], contiguous
  void* residual;      // [T, H], contiguous, or null: residual += x, and the residual is what is normalised
  const void* weight;  // [H]
  const void* bias;    // [H]
  void* out;           // [T, H], contiguous; may be x
  DType dtype;         // of all of them
  int64_t num_tokens;
  int64_t hidden;
  float eps;
  HiddenTap tap;
};

// (x - mean) / deviation * weight + bias. Throws on H > 4096, where 16 bytes divide a row on 32 KiB.
// REQUIRES: out does not overlap the residual.
void layer_norm(const LayerNormParams& p, Stream stream);

struct TapParams {
  const void* x;  // [T, H], contiguous
  DType dtype;
  int64_t num_tokens;
  int64_t hidden;
  HiddenTap tap;
};

// Stores rows that no norm sees, of the tokens that asked for them. REQUIRES: tap.store_output is not set.
void tap_rows(const TapParams& p, Stream stream);

}  // namespace bequest::cuda
