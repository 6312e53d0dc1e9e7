// Activations on the device: f(x), and gated ones: out = f(gate) * up, where a row holds the gate's half and
// then the up's.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "device/stream.h"
#include "ops/activation.h"

namespace bequest::cuda {

struct GatedParams {
  const void* gate_up;  // [T, 2 * I], contiguous
  void* out;            // [T, I], contiguous
  DType dtype;
  int64_t num_tokens;
  int64_t intermediate;  // I
  Activation activation;
};

// REQUIRES: I >= 1; out overlaps nothing else.
void gated_activation(const GatedParams& p, Stream stream);

struct ActivateParams {
  void* x;  // [count], changed in place
  DType dtype;
  int64_t count;
  Activation activation;
};

void activate(const ActivateParams& p, Stream stream);

}  // namespace bequest::cuda
