// The sum of what the pieces of a product have added up.
#pragma once

#include <cstdint>

#include "device/stream.h"

namespace bequest::cuda {

struct SummedParts {
  const float* parts;  // [pieces, T, N]
  int64_t pieces;
  const void* bias;  // [N] bf16, or null
  void* out;         // [T, N] bf16
  int64_t num_rows;  // T
  int64_t outputs;   // N
};

// out = the parts in the order of their pieces, and the bias. REQUIRES: parts and out aligned to pairs.
void sum_parts(const SummedParts& p, Stream stream);

}  // namespace bequest::cuda
