// The device side of a tap.
#pragma once

#include "ops/hidden_tap.h"

namespace bequest::cuda {

// Where the tap wants this row, or null.
template <class T>
__device__ __forceinline__ T* tap_row(const HiddenTap& tap, int64_t token, int64_t hidden) {
  if (tap.ring_rows == nullptr) return nullptr;
  const int64_t first = tap.ring_rows[token];
  if (first < 0) return nullptr;
  const uint64_t low = tap.layers[2 * token];
  const uint64_t high = tap.layers[2 * token + 1];
  const int layer = tap.layer;
  const uint64_t word = layer < 64 ? low : high;
  const uint64_t bit = uint64_t{1} << (layer % 64);
  if ((word & bit) == 0) return nullptr;
  const int before = __popcll(word & (bit - 1)) + (layer < 64 ? 0 : __popcll(low));
  return static_cast<T*>(tap.ring) + (first + before) % tap.num_ring_rows * hidden;
}

}  // namespace bequest::cuda
