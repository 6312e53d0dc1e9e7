// Log-probabilities of the raw model: before masks, penalties and temperature.
#pragma once

#include <cstdint>

namespace bequest {

struct LogprobParams {
  const float* logits;    // [N, V], rows `stride` apart
  int64_t stride;         // elements
  int64_t num;            // N
  int64_t vocab_size;     // V
  const int32_t* chosen;  // [N]
  int64_t top;            // K <= V
  float* chosen_logprob;  // [N]
  int32_t* rank;          // [N]: 1 + number of logits greater than the chosen one
  int32_t* top_ids;       // [N, K], best first, equal ones by lower id
  float* top_logprob;     // [N, K]
};

// A row without a softmax (NaN or +inf in it, or nothing but -inf) gives NaNs, rank 1 and tokens 0.
void logprobs(const LogprobParams& p);

}  // namespace bequest
