// out = x · weightᵀ + bias over codes of a quantised file, by integer dot products: "fast" beside the "exact"
// of ops/cpu/linear_quantised.h.
//
// Rows of x are rounded to integers of 16 bits, block by block of 32 values of k:
//
//   step = max |x| / 32512        x ≈ step * q, |q| <= 32512 = 127 * 256
//
// A block then adds, with what its weights have as scale and offset (ops/cpu/quantised.h),
//
//   (scale * Σ code q) * step + offset * (step * Σ q)
//
// to a float32 sum: Σ in integers, which have no rounding; the other products and sums in float32, block by
// block in the order of k. So an output depends on its row of x and its row of the weight alone, and is the
// same with every kind of dot product. 8 bits instead of 16 would change one greedy token in 25
// (docs/lab/cpu_integers.md).
//
// A value of 16 bits is also two digits of 8 bits, 256 * high + low, for chips that multiply bytes.
#pragma once

#include "core/dot.h"
#include "ops/cpu/linear.h"
#include "ops/cpu/linear_quantised.h"

namespace bequest {

inline constexpr float kMostInteger = 32512.0f;
inline constexpr int64_t kBlockWords = 16;  // of 32 bits, for the 32 values of a block

// Rows of x in the order in which the words of a weight hold their codes.
struct IntegerRows {
  uint32_t* words;  // [T, K / 32, 16]
  float* steps;     // [T, K / 32, 2]: the step, and the step times Σ q
};

// REQUIRES: a format of codes that are multiplied as integers, 32 divides K, T >= 1; otherwise as linear().
void linear_integer(const LinearParams& p);

// Rounds rows [begin, end).
BEQUEST_DECLARE_PER_DOT(void round_rows(const LinearParams& p, int64_t begin, int64_t end,
                                        const IntegerRows& to))
BEQUEST_DECLARE_PER_DOT(QuantisedCut integer_cut(const LinearParams& p))
BEQUEST_DECLARE_PER_DOT(void multiply_integer(const LinearParams& p, const IntegerRows& x,
                                              const QuantisedItem& item, float* scratch))

}  // namespace bequest
