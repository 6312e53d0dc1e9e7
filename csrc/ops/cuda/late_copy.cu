#include <atomic>

#include "device/cuda.cuh"
#include "ops/cuda/late_copy.h"

namespace bequest::cuda {
namespace {

constexpr unsigned kPauseNanoseconds = 200;

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

// One thread: other work goes on beside it.
__global__ void __launch_bounds__(1) wait_kernel(const uint32_t* flag, uint32_t value) {
  while (load_acquire(flag) != value) __nanosleep(kPauseNanoseconds);
}

void copy_in(void* to, const void* from, size_t num_bytes, Stream stream) {
  check_cuda(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyHostToDevice, stream));
}

}  // namespace

void late_copy(const LateCopyParams& p, Stream stream) {
  wait_for_flag(p.flag, p.value, stream);
  copy_in(p.destination, p.source, static_cast<size_t>(p.num_bytes), stream);
  copy_in(p.arrived, p.flag, sizeof(uint32_t), stream);
}

void wait_for_flag(const uint32_t* flag, uint32_t value, Stream stream) {
  launch(wait_kernel, {1, 1}, stream, flag, value);
}

void publish(uint32_t* flag, uint32_t value) {
  std::atomic_ref<uint32_t>(*flag).store(value, std::memory_order_release);
}

}  // namespace bequest::cuda
