// What the two kernels of skinny_linear share.
#pragma once

#include "core/cuda.cuh"
#include "ops/skinny_linear_cuda.h"

namespace bequest::cuda {

inline constexpr int kSkinnyWidth = 8;  // bfloat16 of one 16-byte access

// A weight: read once, and not by the neighbours.
__device__ __forceinline__ uint4 load_once(const uint4* p) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p));
  return v;
}

// The kernel for more than four rows.
void skinny_linear_mma(const SkinnyLinearParams& p, Stream stream);

}  // namespace bequest::cuda
