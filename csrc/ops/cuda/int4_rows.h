// Weights in codes of 4 bits as numbers: what products of many rows multiply.
#pragma once

#include <cstdint>

#include "device/stream.h"

namespace bequest::cuda {

struct Int4RowsParams {
  const void* codes;       // [N, K / 2] bytes, in the order that int4_to_f16 takes
  const uint32_t* groups;  // [N, pitch]: see CodeGroup
  void* out;               // [N, K] bfloat16
  int64_t num_rows;        // N
  int64_t width;           // K, a multiple of 128
  int64_t pitch;           // words of a row of groups
};

void int4_rows(const Int4RowsParams& p, Stream stream);

}  // namespace bequest::cuda
