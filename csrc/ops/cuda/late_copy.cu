#include <atomic>

#include "device/exchange.cuh"
#include "device/launch.cuh"
#include "ops/cuda/late_copy.h"

namespace bequest::cuda {
namespace {

constexpr unsigned kPauseNanoseconds = 200;

// One thread: other work goes on beside it.
__global__ void __launch_bounds__(1) wait_kernel(const uint32_t* flag, uint32_t value) {
  while (load_acquire_from_host(flag) != value) __nanosleep(kPauseNanoseconds);
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
