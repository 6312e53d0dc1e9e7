// y = x Wᵀ + b for up to 64 rows of x and W in codes of 4 bits: reading W is most of the work.
#pragma once

#include <cstdint>

#include "device/stream.h"

namespace bequest::cuda {

inline constexpr int kMostCodedRows = 64;

struct CodedLinearParams {
  const void* x;           // [T, K] bfloat16, contiguous, aligned to 16 bytes
  const void* codes;       // [N, K / 2] bytes, as int4_to_f16 takes them; aligned to 16 bytes
  const uint32_t* scales;  // [N, pitch] words of groups, see CodeGroup
  int64_t pitch;           // words of a row
  const void* bias;        // [N] bfloat16, or null
  void* out;               // [T, N] bfloat16
  float* parts;            // [coded_splits, T, N]: scratch where there are several
  int num_tokens;          // T
  int64_t out_features;
  int64_t in_features;
};

// Whether there is a kernel for weights [N, K].
bool can_multiply_codes(int64_t out_features, int64_t in_features);

// Pieces of k that are summed apart, so that there is work for all multiprocessors.
int64_t coded_splits(int64_t out_features, int64_t in_features);

// A row's result depends on the row alone. REQUIRES: 1 <= T <= kMostCodedRows; can_multiply_codes
void coded_linear(const CodedLinearParams& p, Stream stream);

}  // namespace bequest::cuda
