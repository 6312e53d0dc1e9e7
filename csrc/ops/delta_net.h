// The gated delta rule over a short causal convolution: what a recurrent layer does between its two products.
//
// A value head keeps a matrix S [DK, DV]. With a token's key k, query q, value v, decay g and rate β
//
//   S ← g S + k (β (v - g Sᵀ k))ᵀ        o = Sᵀ q
//
// q, k and v come out of the convolution and a silu; q and k are scaled to length one, and q by 1 / √DK. β is
// the logistic function of b, g is e^(decay · softplus(a + step_bias)). o is normed by its root mean square
// and multiplied by silu(z).
//
// Tokens of a sequence pass one after another, whatever the step around them is, and each column of S is a
// chain of multiply-adds of its own. So a token's bits depend neither on the batch nor on how its prompt was
// cut into steps, and the state behind any token of a chunk can be kept.
#pragma once

#include <cstdint>

namespace bequest {

inline constexpr float kSmallestSquare = 1e-6f;  // added to the square of a query's or a key's length

struct DeltaNetSizes {
  int64_t key_heads;    // HK: of queries and keys
  int64_t value_heads;  // HV: a multiple of HK; HV / HK neighbours share a key
  int64_t key_dim;      // DK
  int64_t value_dim;    // DV
  int64_t conv_width;   // CW: tokens that the convolution sees, the token itself included

  constexpr int64_t key_size() const { return key_heads * key_dim; }
  constexpr int64_t value_size() const { return value_heads * value_dim; }
  constexpr int64_t conv_channels() const { return 2 * key_size() + value_size(); }  // C
  constexpr int64_t row_size() const { return conv_channels() + value_size() + 2 * value_heads; }
  constexpr int64_t matrix_floats() const { return value_size() * key_dim; }
  // Of one layer: the matrices [HV, DK, DV], then the last inputs of the convolution [CW - 1, C].
  constexpr int64_t state_floats() const { return matrix_floats() + (conv_width - 1) * conv_channels(); }
};

}  // namespace bequest
