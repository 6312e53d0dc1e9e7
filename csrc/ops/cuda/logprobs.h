// Log-probabilities of the raw model on the device: the contract of ops/cpu/logprobs.h.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "device/stream.h"

namespace bequest::cuda {

struct LogprobParams {
  const void* logits;  // [N, V], rows `stride` apart
  DType dtype;
  int64_t stride;         // elements
  int64_t num;            // N
  int64_t vocab_size;     // V
  const int32_t* chosen;  // [N]; one outside [0, V) makes the row count as broken
  int64_t top;            // K <= min(V, 1024)
  float* chosen_logprob;  // [N]
  int32_t* rank;          // [N]: 1 + number of logits greater than the chosen one
  int32_t* top_ids;       // [N, K], best first, equal ones by lower id
  float* top_logprob;     // [N, K]
};

// A row without a softmax (NaN or +inf in it, or nothing but -inf) gives NaNs, rank 1 and tokens 0.
void logprobs(const LogprobParams& p, Stream stream);

}  // namespace bequest::cuda
