// Rows in e4m3 with a scale each, for products of many rows with weights in e4m3.
#pragma once

#include <cstdint>

#include "device/stream.h"

namespace bequest::cuda {

struct Float8Rows {
  void* codes;    // [T, K] e4m3, contiguous, aligned to 8 bytes
  float* scales;  // [T]: x = scale * code; the largest code of a row is the largest there is
};

struct Float8RowsParams {
  const void* x;  // [T, K] bfloat16, contiguous, aligned to 16 bytes
  Float8Rows to;
  int64_t num_tokens;
  int64_t width;  // K
};

// A row depends on the row alone. Throws on K > 65536. REQUIRES: 8 divides K.
void float8_rows(const Float8RowsParams& p, Stream stream);

}  // namespace bequest::cuda
