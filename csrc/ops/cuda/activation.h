// Activations on the device: f(x), and gated ones: out = f(gate) * up, where a row holds the gate's half and
// then the up's.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "device/stream.h"
#include "ops/activation.h"
#include "ops/cuda/float8_rows.h"

namespace bequest::cuda {

struct GatedParams {
  const void* gate_up;  // [T, 2 * I], contiguous
  void* out;            // [T, I], contiguous; null: codes are the result
  DType dtype;
  int64_t num_tokens;
  int64_t intermediate;  // I
  Activation activation;
  Float8Rows codes = {};  // where the result goes instead of `out`, rounded once more
};

// Codes are of bfloat16 and of rows that a thread block can hold: of I up to so many.
inline constexpr int64_t kMostGatedCodes = 32768;

// REQUIRES: I >= 1; out overlaps nothing else; with codes 8 divides I and gate_up is aligned to 16 bytes.
void gated_activation(const GatedParams& p, Stream stream);

struct ActivateParams {
  void* x;  // [count], changed in place
  DType dtype;
  int64_t count;
  Activation activation;
};

void activate(const ActivateParams& p, Stream stream);

}  // namespace bequest::cuda
