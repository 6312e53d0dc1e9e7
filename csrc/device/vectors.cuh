// Elements of all dtypes as float32: one by one, and in wide loads and stores.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "core/dtype.h"

namespace bequest::cuda {

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

}  // namespace detail

// W elements as memory has them: a row that waits in registers takes half as many of them in bfloat16.
template <class T, int W>
union Packed {
  using Raw = typename detail::Access<sizeof(T) * W>::Type;
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

template <class T, int W>
__device__ __forceinline__ Packed<T, W> pack(const float (&x)[W]) {
  Packed<T, W> packed;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < W; ++i) packed.word[i] = __float_as_uint(x[i]);
  } else if constexpr (W == 1) {
    packed.word[0] = narrow<T>(x[0]).bits;
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
  return packed;
}

template <class T, int W>
__device__ __forceinline__ Packed<T, W> load_packed(const T* p) {
  Packed<T, W> packed;
  packed.raw = *reinterpret_cast<const typename Packed<T, W>::Raw*>(p);
  return packed;
}

// The same for what no kernel in flight writes (weights).
template <class T, int W>
__device__ __forceinline__ Packed<T, W> load_packed_constant(const T* p) {
  Packed<T, W> packed;
  packed.raw = __ldg(reinterpret_cast<const typename Packed<T, W>::Raw*>(p));
  return packed;
}

template <class T, int W>
__device__ __forceinline__ void store_packed(T* p, const Packed<T, W>& packed) {
  *reinterpret_cast<typename Packed<T, W>::Raw*>(p) = packed.raw;
}

// W elements as float32 in one access. REQUIRES: p is aligned to W elements; W elements are 2 to 16 bytes.
template <class T, int W>
__device__ __forceinline__ void load_vector(const T* p, float (&x)[W]) {
  if constexpr (W == 1) {
    x[0] = widen(*p);
  } else {
    unpack<T, W>(load_packed<T, W>(p), x);
  }
}

// The same for what no kernel in flight writes (weights).
template <class T, int W>
__device__ __forceinline__ void load_constant(const T* p, float (&x)[W]) {
  if constexpr (W == 1) {
    x[0] = widen(*p);
  } else {
    unpack<T, W>(load_packed_constant<T, W>(p), x);
  }
}

template <class T, int W>
__device__ __forceinline__ void store_vector(T* p, const float (&x)[W]) {
  if constexpr (W == 1) {
    *p = narrow<T>(x[0]);
  } else {
    store_packed<T, W>(p, pack<T, W>(x));
  }
}

}  // namespace bequest::cuda
