// Rotary position embedding, half-rotation style: dimension i of the first half turns with dimension i of
// the second.
#pragma once

#include <cstdint>

namespace bequest {

struct RotaryParams {
  float* q;          // [T, NQ, D], rotated in place; heads are contiguous
  float* k;          // [T, NKV, D], likewise
  int64_t q_stride;  // floats from one token to the next
  int64_t k_stride;
  const int32_t* positions;  // [T], in [0, P)
  const float* cos_sin;      // [P, R]: cosines of R / 2 angles, then their sines
  int64_t num_tokens;
  int64_t num_positions;  // P
  int64_t q_heads;
  int64_t k_heads;
  int64_t head_dim;
  int64_t rotary_dim;                   // R: even, at most D; the rest of a head stays as it is
  const float* query_scales = nullptr;  // [P]: what whole queries are multiplied by then, or null
};

// Throws on a position outside the table, before anything is written.
void rotary(const RotaryParams& p);

}  // namespace bequest
