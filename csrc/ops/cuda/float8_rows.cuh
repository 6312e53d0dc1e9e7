// What kernels that round rows to e4m3 share.
#pragma once

#include "ops/cuda/float8_rows.h"

namespace bequest::cuda {

// By the largest magnitude of the row: its code is the largest there is.
__device__ __forceinline__ float float8_scale(float largest) {
  constexpr float kLargestCode = 448;
  return largest > 0 ? largest / kLargestCode : 1.0f;
}

}  // namespace bequest::cuda
