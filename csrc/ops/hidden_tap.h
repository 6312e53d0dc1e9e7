// Hidden states on their way out of a step: a norm stores what it sees for the tokens that asked for it.
#pragma once

#include <cstdint>

namespace bequest {

// One predicated store, nothing for tokens that did not ask. A token's wanted layers lie in consecutive ring
// rows, in ascending order. The table is data, so a captured graph serves steps with and without taps.
struct HiddenTap {
  const int32_t* ring_rows;  // [T] first ring row of the token, -1: it asked for nothing; null: no tap at all
  const uint64_t* layers;    // [T, 2] bit i: the token wants layer i in [0, 128)
  void* ring;                // [num_ring_rows, H], dtype of the activations; indices wrap around
  int64_t num_ring_rows;
  int32_t layer;      // which layer this norm sees
  bool store_output;  // the normalised row (the last layer's state), else the residual after the addition
};

inline bool in_range(const HiddenTap& tap) {
  return tap.ring_rows == nullptr || (tap.layer >= 0 && tap.layer < 128 && tap.num_ring_rows > 0);
}

}  // namespace bequest
