// Barriers within a thread block or a cluster.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/shared_memory.cuh"

namespace bequest::cuda {

// --- in shared memory -----------------------------------------------------------------------------------

// A phase ends when all arrivals and all announced bytes are there.
class PhaseBarrier {
 public:
  __device__ void init(uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory");
  }
  __device__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }
  // Arrives, and announces bytes that copies will bring.
  __device__ void arrive_expecting(uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes)
                 : "memory");
  }
  // Arrives when all copies have landed that this thread has asked for, without waiting for them.
  __device__ void arrive_behind_copies() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address()) : "memory");
  }
  // Until the phase of this parity has ended; the first phase has parity 0.
  __device__ void wait(uint32_t parity) const {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}\n" ::"r"(address()),
        "r"(parity)
        : "memory");
  }
  // Whether it has.
  __device__ bool has_ended(uint32_t parity) const {
    uint32_t has;
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n}\n"
        : "=r"(has)
        : "r"(address()), "r"(parity)
        : "memory");
    return has != 0;
  }
  __device__ uint32_t address() const { return shared_address(&state_); }

 private:
  uint64_t state_;
};

// Makes initialised barriers known to the copy engine and to other blocks. Before a __syncthreads.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Ordinary writes to shared memory before it are seen by tensor cores and copy engine after it.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A place in a ring of kStages buffers, and the parity of the phase that its barriers are in.
template <int kStages>
struct Cursor {
  int index = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    index = index + 1 == kStages ? 0 : index + 1;
    parity ^= index == 0;
  }
};

// The same in a ring whose length is known when it runs.
struct RingCursor {
  int index = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++index < stages) return;
    index = 0;
    parity ^= 1;
  }
};

// --- by number, from 1 on: 0 is that of __syncthreads ---------------------------------------------------

// Of kThreads threads, whole warps.
template <int kNumber, int kThreads>
__device__ __forceinline__ void sync_threads() {
  asm volatile("bar.sync %0, %1;" ::"n"(kNumber), "n"(kThreads) : "memory");
}

// Of one warpgroup.
__device__ inline void sync_warpgroup(int number) {
  asm volatile("bar.sync %0, 128;" ::"r"(number) : "memory");
}

// Of two warpgroups: one waits for its turn, the other gives it.
__device__ inline void await_turn(int number) { asm volatile("bar.sync %0, 256;" ::"r"(number) : "memory"); }
__device__ inline void give_turn(int number) { asm volatile("bar.arrive %0, 256;" ::"r"(number) : "memory"); }

}  // namespace bequest::cuda
