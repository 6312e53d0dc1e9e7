// Products over the matrices of experts: each row of x has the number of the expert that it goes to.
//
// Rows are sorted by their expert, and those of one expert pass over its matrix together, through linear()
// (ops/cpu/linear.h). So only the experts that somebody uses are read, each once, and every result has the
// bits that linear() gives a row alone.
#pragma once

#include <cstdint>

#include "ops/activation.h"
#include "ops/cpu/linear.h"

namespace bequest {

// The same matrix [N, K] of each expert, packed as in ops/cpu/linear.h.
struct ExpertMatrices {
  const char* data;  // [E], `stride` bytes apart
  int64_t stride;
  int64_t num_experts;  // E
  WeightFormat format;
  const float* bias;     // [E, N], or null
  int64_t out_features;  // N
  int64_t in_features;   // K
  int64_t site = -1;     // what adapters know expert 0's by; expert e's is e more
};

// The experts of T tokens, by rank.
struct ChosenExperts {
  const int32_t* ids;    // [T, top_k]
  const float* weights;  // [T, top_k]: what each counts
  int64_t num_tokens;
  int64_t top_k;

  int64_t num_rows() const { return num_tokens * top_k; }
};

// x [T, K] → out [T top_k, N / 2]: of each token and each of its experts f(gate) * up, where the first half
// of a matrix is the gate's. REQUIRES: arrays are contiguous; out overlaps nothing else. Throws on a wrong
// number.
void expert_gated(const ExpertMatrices& gate_up, const ChosenExperts& chosen, const float* x,
                  Activation activation, float* out);

// x [T top_k, K] → out [T, N]: the products times what the experts count, added by rank. REQUIRES: as above.
void expert_summed(const ExpertMatrices& down, const ChosenExperts& chosen, const float* x, float* out);

struct ExpertsParams {
  const float* x;          // [T, H], contiguous
  ExpertMatrices gate_up;  // [2 I, H]
  Activation activation;
  ExpertMatrices down;  // [H, I]
  ChosenExperts chosen;
  float* out;  // [T, H], contiguous
};

// Both, to the bit, without storing what is between them for more than a block of tokens. Returns how many
// experts were read. REQUIRES: as above.
int64_t experts(const ExpertsParams& p);

}  // namespace bequest
