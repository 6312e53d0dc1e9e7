// Activations: f(x), and gated ones: out = f(gate) * up, where a row holds the gate's half and then the up's.
#pragma once

#include <cstdint>

#include "ops/activation.h"

namespace bequest {

struct GatedParams {
  const float* gate_up;  // [T, 2 * I], contiguous
  float* out;            // [T, I], contiguous
  int64_t num_tokens;
  int64_t intermediate;  // I
  Activation activation;
};

// REQUIRES: I >= 1; out overlaps nothing else.
void gated_activation(const GatedParams& p);

// x [count] = f(x), in place.
void activate(float* x, int64_t count, Activation activation);

}  // namespace bequest
