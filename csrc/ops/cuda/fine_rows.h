// Weights in codes with fine scales (fine_codes.h) as numbers: what products of many rows multiply.
#pragma once

#include "device/stream.h"
#include "ops/cuda/fine_codes.h"

namespace bequest::cuda {

// out: [E, N, K] bfloat16, aligned to 16 bytes
void fine_rows(const FineMatrices& matrices, void* out, Stream stream);

}  // namespace bequest::cuda
