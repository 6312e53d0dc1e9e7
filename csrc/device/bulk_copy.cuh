// What copies by the copy engine of a multiprocessor (Hopper and later) need: the barriers that they complete
// on, and how long their bytes stay in the L2.
#pragma once

#include <cstdint>

namespace bequest::cuda {

__device__ __forceinline__ uint32_t shared_offset(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// A barrier in shared memory: a phase ends when all arrivals and all announced bytes are there.
class PhaseBarrier {
 public:
  __device__ void init(uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_offset(&state_)), "r"(arrivals)
                 : "memory");
  }
  __device__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_offset(&state_)) : "memory");
  }
  // Arrives, and announces bytes that copies will bring.
  __device__ void arrive_expecting(uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_offset(&state_)),
                 "r"(bytes)
                 : "memory");
  }
  // Until the phase of this parity has ended; the first phase has parity 0.
  __device__ void wait(uint32_t parity) {
    uint32_t done = 0;
    do {
      asm volatile(
          "{ .reg .pred p;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p; }"
          : "=r"(done)
          : "r"(shared_offset(&state_)), "r"(parity)
          : "memory");
    } while (done == 0);
  }
  __device__ uint32_t address() const { return shared_offset(&state_); }

 private:
  uint64_t state_;
};

// After init, before other threads or the copy engine use the barriers.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// For what is read once: it leaves the L2 first.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

}  // namespace bequest::cuda
