// Words that thread blocks of one grid, or the host, leave for each other in memory, and waiting for them.
//
// A relaxed word is there or not, and says nothing about other words: what has to be seen with it is part of
// it. Who acquires a counter sees all that was written before the counter was released.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace bequest::cuda {

__device__ __forceinline__ void store_relaxed(uint32_t* to, uint32_t word) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}
__device__ __forceinline__ void store_relaxed(uint64_t* to, uint64_t word) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}
__device__ __forceinline__ void store_relaxed(uint32_t* to, float first, float second) {
  asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(first), "f"(second) : "memory");
}
__device__ __forceinline__ void store_relaxed(uint32_t* to, const uint4& words) {
  asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y),
               "r"(words.z), "r"(words.w)
               : "memory");
}

__device__ __forceinline__ void load_relaxed(uint32_t (&words)[1], const uint32_t* from) {
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(words[0]) : "l"(from) : "memory");
}
__device__ __forceinline__ void load_relaxed(uint32_t (&words)[2], const uint32_t* from) {
  asm volatile("ld.relaxed.gpu.global.v2.b32 {%0, %1}, [%2];"
               : "=r"(words[0]), "=r"(words[1])
               : "l"(from)
               : "memory");
}
__device__ __forceinline__ void load_relaxed(uint32_t (&words)[4], const uint32_t* from) {
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "l"(from)
               : "memory");
}
__device__ __forceinline__ uint64_t load_relaxed(const uint64_t* from) {
  uint64_t word;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  return word;
}
__device__ __forceinline__ void load_relaxed(uint64_t (&words)[2], const void* from) {
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(words[0]), "=l"(words[1])
               : "l"(from)
               : "memory");
}

__device__ __forceinline__ void add_one_release(int32_t* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ int32_t load_acquire(const int32_t* counter) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}
// Of what the host releases.
__device__ __forceinline__ uint32_t load_acquire_from_host(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

// Waiting in a kernel must not last: nothing that it waits for takes seconds. Asked once per round, it ends
// such a wait in a trap.
class Patience {
 public:
  __device__ __forceinline__ void spend() {
    if (++rounds_ == kMostRounds) __trap();
  }

 private:
  static constexpr int kMostRounds = 1 << 24;  // seconds
  int rounds_ = 0;
};

}  // namespace bequest::cuda
