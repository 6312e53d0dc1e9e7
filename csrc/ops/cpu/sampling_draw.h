// The draw: argmax over the kept tokens of x / T + Gumbel noise, which is a sample from softmax(x / T).
//
// The noise of token v is a pure function of (seed, position, choice, v): word v % 4 of
// philox4x32({v / 4, position, choice, 0}, seed) = b, then w = (b + 0.5) / 2^32 (rounded to float, at most
// 1 - 2^-24) and noise = -log(-log(1 - w)). Small w are the large noises, and floats are dense near 0: the
// tail that decides among many tokens is finely resolved. Equal scores go to the lower id.
#pragma once

#include <cstdint>

#include "ops/cpu/vocab_scan.h"

namespace bequest {

struct DrawKey {
  uint64_t seed;
  uint32_t position;
  uint32_t choice;
};

// Kept are x > value, and of x == value those with id <= last_id.
struct Cutoff {
  float value;
  int32_t last_id;
};

// Over a whole row x [n]. REQUIRES: best_id is its argmax and kept.
int32_t draw(const float* x, int64_t n, float inverse_temperature, Cutoff cutoff, int32_t best_id,
             const DrawKey& key);

// Over a list of tokens. REQUIRES: n >= 1.
int32_t draw_from(const Candidate* candidates, int64_t n, float inverse_temperature, const DrawKey& key);

}  // namespace bequest
