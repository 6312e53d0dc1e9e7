// The blocks of a cluster: their shared memory, and waiting for each other.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace bequest::cuda {

// What lies at `address` here, in block `rank`.
__device__ inline uint32_t address_in_block(uint32_t address, int rank) {
  uint32_t result;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(rank));
  return result;
}

// This block has begun, and its barriers can be used by others if publish_barriers() is behind their making;
// or it has read what others may now write over. It orders nothing else, because that would wait for all
// memory that was asked for: what was read must have arrived. By all threads; then await_cluster().
__device__ inline void arrive_in_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
// Until all blocks have arrived.
__device__ inline void await_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Whoever awaits sees what was written before all have arrived. Not all threads need to be at the same place.
__device__ inline void publish_in_cluster() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ inline void await_published() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// From another block's shared memory.
__device__ inline float4 load_four_in_cluster(uint32_t address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Both addresses are in the same block, and the bytes complete on the barrier.
__device__ inline void send_async(uint32_t to, uint32_t word, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
               "r"(word), "r"(barrier)
               : "memory");
}
__device__ inline void send_async(uint32_t to, const float4& v, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
      : "memory");
}
__device__ inline void send_async(uint32_t to, const float2& v, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
               "f"(v.x), "f"(v.y), "r"(barrier)
               : "memory");
}

}  // namespace bequest::cuda
