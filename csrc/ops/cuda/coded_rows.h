// Weights in codes of 4 bits, in groups of 128, as numbers: what products of many rows multiply.
#pragma once

#include <cstdint>

#include "device/stream.h"

namespace bequest::cuda {

struct CodedRowsParams {
  const void* codes;       // [N, K / 2] bytes, in the order that int4_to_f16 takes
  const uint32_t* groups;  // [N, pitch]: see CodeGroup
  int64_t pitch;           // words of a row of groups
  void* out;               // [N, K] bfloat16
  int64_t num_rows;        // N
  int64_t width;           // K, a multiple of 128
};

void coded_rows(const CodedRowsParams& p, Stream stream);

}  // namespace bequest::cuda
