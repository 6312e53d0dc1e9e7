// What CUDA kernels share: checked launches, wide loads and stores of both dtypes as float32, reductions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <source_location>
#include <string>
#include <type_traits>

#include "core/check.h"
#include "core/dtype.h"
#include "device/stream.h"

namespace bequest::cuda {

// --- host
// -----------------------------------------------------------------------------------------------------

inline void check_cuda(cudaError_t status, std::source_location where = std::source_location::current()) {
  if (status != cudaSuccess) [[unlikely]]
    fail(std::string("CUDA: ") + cudaGetErrorString(status), where);
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

inline bool is_aligned(const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

struct LaunchShape {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;  // dynamic
  unsigned cluster = 1;     // CTAs per cluster, along x
  // The grid may start beside its predecessor in the stream; it calls wait_for_previous() before it touches
  // anything that the predecessor reads or writes.
  bool overlaps_previous = false;
};

// Launches and checks the launch. An empty grid is no work and no launch.
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), const LaunchShape& shape, Stream stream, Args... args) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
  constexpr size_t kSharedWithoutAsking = 48 * 1024;
  if (shape.shared_bytes > kSharedWithoutAsking)
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shape.shared_bytes)));
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (shape.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {shape.cluster, 1, 1};
  }
  if (shape.overlaps_previous) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  check_cuda(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...));
}

// --- overlap of consecutive kernels
// -----------------------------------------------------------------------------------------------------

// Until the grid before this one has ended and its results can be read.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The grid after this one may be brought onto the chip; its wait_for_previous() still waits for our end.
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }

// --- elements
// ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(BFloat16 x) { return __uint_as_float(uint32_t{x.bits} << 16); }

__device__ __forceinline__ float widen(Float8 x) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(x.bits, __NV_E4M3)));
}

// To Float8 what is too large becomes the largest value.
template <class T>
__device__ __forceinline__ T narrow(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, Float8>) {
    return {__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3)};
  } else {
    return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
  }
}

// x as it is after a store and a load.
template <class T>
__device__ __forceinline__ float rounded(float x) {
  return widen(narrow<T>(x));
}

// Elements of one 16-byte access.
template <class T>
inline constexpr int kVectorWidth = 16 / sizeof(T);

namespace detail {

// clang-format off
template <int Bytes> struct Access;
template <> struct Access<16> { using Type = uint4; };
template <> struct Access<8> { using Type = uint2; };
template <> struct Access<4> { using Type = uint32_t; };
template <> struct Access<2> { using Type = uint16_t; };
// clang-format on

template <class T, int W>
union Packed {
  using Raw = typename Access<sizeof(T) * W>::Type;
  static constexpr int kWords = sizeof(T) * W / 4 > 0 ? sizeof(T) * W / 4 : 1;
  Raw raw;
  uint32_t word[kWords];
  uint16_t pair[2 * kWords];  // of one-byte elements
};

template <class T, int W>
__device__ __forceinline__ void unpack(const Packed<T, W>& packed, float (&x)[W]) {
#pragma unroll
  for (int i = 0; i < W; ++i) {
    if constexpr (sizeof(T) == 4) {
      x[i] = __uint_as_float(packed.word[i]);
    } else {
      const uint32_t word = packed.word[i / 2];
      x[i] = __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
    }
  }
}

}  // namespace detail

// W elements as float32 in one access. REQUIRES: p is aligned to W elements; W elements are 2 to 16 bytes.
template <class T, int W>
__device__ __forceinline__ void load_vector(const T* p, float (&x)[W]) {
  if constexpr (W == 1) {
    x[0] = widen(*p);
  } else {
    detail::Packed<T, W> packed;
    packed.raw = *reinterpret_cast<const typename detail::Packed<T, W>::Raw*>(p);
    detail::unpack<T, W>(packed, x);
  }
}

// The same for what no kernel in flight writes (weights).
template <class T, int W>
__device__ __forceinline__ void load_constant(const T* p, float (&x)[W]) {
  if constexpr (W == 1) {
    x[0] = widen(*p);
  } else {
    detail::Packed<T, W> packed;
    packed.raw = __ldg(reinterpret_cast<const typename detail::Packed<T, W>::Raw*>(p));
    detail::unpack<T, W>(packed, x);
  }
}

template <class T, int W>
__device__ __forceinline__ void store_vector(T* p, const float (&x)[W]) {
  if constexpr (W == 1) {
    *p = narrow<T>(x[0]);
  } else {
    detail::Packed<T, W> packed;
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < W; ++i) packed.word[i] = __float_as_uint(x[i]);
    } else if constexpr (sizeof(T) == 1) {
#pragma unroll
      for (int i = 0; i < W; i += 2)
        packed.pair[i / 2] = __nv_cvt_float2_to_fp8x2({x[i], x[i + 1]}, __NV_SATFINITE, __NV_E4M3);
    } else {
#pragma unroll
      for (int i = 0; i < W; i += 2) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x[i], x[i + 1]);
        packed.word[i / 2] = *reinterpret_cast<const uint32_t*>(&pair);
      }
    }
    *reinterpret_cast<typename detail::Packed<T, W>::Raw*>(p) = packed.raw;
  }
}

// --- reductions
// -------------------------------------------------------------------------------------------------

inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

// op over the warp, in every lane; the order of operations is fixed.
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
