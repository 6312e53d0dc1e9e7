// Copies to shared memory that run by themselves: those of threads, in groups, and those of the copy engine
// (Hopper and later), which complete on a barrier.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "device/barriers.cuh"

namespace bequest::cuda {

// What is read once leaves the L2 before all else.
__device__ __forceinline__ uint64_t read_once_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// --- by threads -----------------------------------------------------------------------------------------

// Copies 16 bytes to shared memory, or zeros if !valid (the source is then not read). No prefetch hint:
// fetching 256 bytes ahead into L2 cost 5 % of the bandwidth.
__device__ inline void copy_16_async(uint32_t destination, const void* source, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes)
               : "memory");
}

// The same for what is read once.
__device__ inline void copy_16_once_async(uint32_t destination, const void* source, bool valid,
                                          uint64_t policy) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(destination),
               "l"(source), "r"(bytes), "l"(policy)
               : "memory");
}
__device__ inline void copy_4_async(uint32_t destination, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(destination), "l"(source) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// --- by the copy engine ---------------------------------------------------------------------------------

// Asks the L2 for bytes that nobody needs yet; `from` and `bytes` are multiples of 16.
__device__ __forceinline__ void prefetch_bytes(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
__device__ inline void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// The map's box at `column`, `row`, `block` to shared memory; its bytes complete on `barrier`. By one thread.
__device__ inline void copy_box(const CUtensorMap& map, uint32_t destination, const PhaseBarrier& barrier,
                                int column, int row, int block) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
      "%4}], "
      "[%5];" ::"r"(destination),
      "l"(&map), "r"(column), "r"(row), "r"(block), "r"(barrier.address())
      : "memory");
}
// The way back. Ordinary writes to shared memory are behind a fence_async_proxy. By one thread, which calls
// wait_stores() before the memory is written again.
__device__ __forceinline__ void store_box(const CUtensorMap& map, uint32_t source, int column, int row,
                                          int block) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
      "r"(column), "r"(row), "r"(block), "r"(source)
      : "memory");
}
// Until all that the thread stores has been read.
__device__ __forceinline__ void wait_stores() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}

// The same as copy_box of a map of four dimensions, at `at`.
__device__ __forceinline__ void copy_box(const CUtensorMap& map, uint32_t destination,
                                         const PhaseBarrier& barrier, int4 at, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(destination),
      "l"(&map), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w), "r"(barrier.address()), "l"(policy)
      : "memory");
}

// The same of a map of five dimensions, of whose last the box has `last` alone.
__device__ __forceinline__ void copy_box(const CUtensorMap& map, uint32_t destination,
                                         const PhaseBarrier& barrier, int4 at, int last, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(destination),
      "l"(&map), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w), "r"(last), "r"(barrier.address()), "l"(policy)
      : "memory");
}

// The same box into the L2 alone.
__device__ __forceinline__ void prefetch_box(const CUtensorMap& map, int4 at, int last) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];" ::"l"(&map),
               "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w), "r"(last)
               : "memory");
}

// Bytes that lie side by side, a multiple of 16, to shared memory. By one thread.
__device__ __forceinline__ void copy_run(uint32_t destination, const void* source, uint32_t bytes,
                                         const PhaseBarrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          destination),
      "l"(source), "r"(bytes), "r"(barrier.address())
      : "memory");
}

// True in one thread of a whole warp, and the compiler knows that it is one: around copy_box it then needs no
// loop over threads.
__device__ __forceinline__ bool is_elected() {
  uint32_t elected;
  asm volatile(
      "{\n.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.b32 %0, 1, 0, p;\n}\n"
      : "=r"(elected));
  return elected != 0;
}

}  // namespace bequest::cuda
