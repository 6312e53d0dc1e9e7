// Root-mean-square norm on the device, with the residual's addition and the hidden-state tap in the same
// pass. A row's result depends on the row alone, to the bit.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/stream.h"

namespace bequest::cuda {

// Stores what a norm sees into a ring of rows, for the tokens that asked for it: one predicated store,
// nothing for the others. A token's wanted layers lie in consecutive ring rows, in ascending order. The table
// is data, so a captured graph serves steps with and without taps.
struct HiddenTap {
  const int32_t* ring_rows;  // [T] first ring row of the token, -1: it asked for nothing; null: no tap at all
  const uint64_t* layers;    // [T, 2] bit i: the token wants layer i in [0, 128)
  void* ring;                // [num_ring_rows, H], dtype of the activations; indices wrap around
  int64_t num_ring_rows;
  int32_t layer;      // which layer this norm sees
  bool store_output;  // the normalised row (the last layer's state), else the residual after the addition
};

struct RmsNormParams {
  const void* x;       // [T, H], contiguous
  void* residual;      // [T, H], contiguous, or null: residual += x, and the residual is what is normalised
  const void* weight;  // [H]
  void* out;           // [T, H], contiguous; may be x
  DType dtype;         // of all of them
  int64_t num_tokens;
  int64_t hidden;
  float eps;
  HiddenTap tap;
};

// Throws on H > 8192, in bf16 with H a multiple of 8 on H > 16384. REQUIRES: out does not overlap the
// residual.
void rms_norm(const RmsNormParams& p, Stream stream);

}  // namespace bequest::cuda
