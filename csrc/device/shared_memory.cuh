// Addresses in shared memory, and a lane's accesses by them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace bequest::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// A lane's 4, 8 or 16 bytes, in one access.
__device__ __forceinline__ uint32_t load_4(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_8(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ uint4 load_16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_4(uint32_t address, uint32_t v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
__device__ __forceinline__ void store_8(uint32_t address, const float2& v) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(v.x), "f"(v.y) : "memory");
}
__device__ __forceinline__ void store_16(uint32_t address, const uint4& v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

// The same, as registers that are indexed.
__device__ __forceinline__ void load_8(uint32_t (&r)[2], uint32_t address) {
  const uint2 v = load_8(address);
  r[0] = v.x, r[1] = v.y;
}
__device__ __forceinline__ void load_16(uint32_t (&r)[4], uint32_t address) {
  const uint4 v = load_16(address);
  r[0] = v.x, r[1] = v.y, r[2] = v.z, r[3] = v.w;
}
__device__ __forceinline__ void store_16(uint32_t address, const uint32_t (&r)[4]) {
  store_16(address, make_uint4(r[0], r[1], r[2], r[3]));
}

}  // namespace bequest::cuda
