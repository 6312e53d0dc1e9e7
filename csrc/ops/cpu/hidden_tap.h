// The CPU's side of a tap: rows that no norm sees on their way.
#pragma once

#include <cstdint>

#include "ops/hidden_tap.h"

namespace bequest {

// Where the tap wants this token's row, or null. Internal linkage: a file compiled for a wide instruction set
// keeps its own copy.
static inline float* tap_row(const HiddenTap& tap, int64_t token, int64_t hidden) {
  if (!tap.ring_rows || tap.ring_rows[token] < 0) return nullptr;
  const uint64_t low = tap.layers[2 * token], high = tap.layers[2 * token + 1];
  const uint64_t word = tap.layer < 64 ? low : high, bit = uint64_t{1} << (tap.layer % 64);
  if (!(word & bit)) return nullptr;
  const int before =
      __builtin_popcountll(word & (bit - 1)) + (tap.layer < 64 ? 0 : __builtin_popcountll(low));
  return static_cast<float*>(tap.ring) + (tap.ring_rows[token] + before) % tap.num_ring_rows * hidden;
}

// Stores rows x [T, H], contiguous, of the tokens that asked for them. REQUIRES: tap.store_output is not set.
void tap_rows(const float* x, int64_t num_tokens, int64_t hidden, const HiddenTap& tap);

}  // namespace bequest
