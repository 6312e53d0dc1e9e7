// Reductions over lanes, warps and blocks. The order of operations is fixed, so a result is the same whenever
// its operands are.
#pragma once

#include <cuda_runtime.h>

namespace bequest::cuda {

inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

// op over the warp, in every lane.
template <class V, class Op>
__device__ __forceinline__ V warp_reduce(V v, Op op) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
    v = op(v, __shfl_xor_sync(kAllLanes, v, distance));
  return v;
}

__device__ __forceinline__ float warp_sum(float v) {
  return warp_reduce(v, [](float a, float b) { return a + b; });
}
__device__ __forceinline__ float warp_max(float v) {
  return warp_reduce(v, [](float a, float b) { return fmaxf(a, b); });
}

// warp_sum of each, side by side.
template <int N>
__device__ __forceinline__ void warp_sums(float (&v)[N]) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] += __shfl_xor_sync(kAllLanes, v[i], distance);
}

// Over four neighbouring lanes, which hold one row of a matrix product.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

// Over the block, in every thread. `shared` holds one element per warp and may be used again after the next
// __syncthreads. REQUIRES: whole warps, all of them here.
template <class V, class Op>
__device__ __forceinline__ V block_reduce(V v, V* shared, Op op) {
  v = warp_reduce(v, op);
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = v;
  __syncthreads();
  V total = shared[0];
  for (unsigned warp = 1; warp < blockDim.x / kWarp; ++warp) total = op(total, shared[warp]);
  return total;
}

}  // namespace bequest::cuda
