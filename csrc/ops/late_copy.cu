#include <algorithm>
#include <atomic>

#include "core/cuda.cuh"
#include "ops/late_copy_cuda.h"

namespace bequest::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 32;  // enough for what a bus brings
constexpr unsigned kPauseNanoseconds = 500;

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

__global__ void __launch_bounds__(kThreads) late_copy_kernel(const LateCopyParams p) {
  if (threadIdx.x == 0)
    while (load_acquire(p.flag) != p.value) __nanosleep(kPauseNanoseconds);
  __syncthreads();
  const auto* from = static_cast<const uint4*>(p.source);
  auto* to = static_cast<uint4*>(p.destination);
  const int64_t count = p.num_bytes / int64_t{sizeof(uint4)};
  // Never from a cache: the place was read before, with what an earlier step had there.
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads)
    to[i] = __ldcv(from + i);
}

}  // namespace

void late_copy(const LateCopyParams& p, Stream stream) {
  check(p.num_bytes > 0 && p.num_bytes % int64_t{sizeof(uint4)} == 0 && is_aligned(p.source, sizeof(uint4)) &&
            is_aligned(p.destination, sizeof(uint4)),
        "late_copy: not whole vectors of 16 bytes");
  const int64_t blocks = ceil_div(p.num_bytes, int64_t{kThreads * sizeof(uint4)});
  launch(late_copy_kernel, {static_cast<unsigned>(std::min(blocks, kMostBlocks)), kThreads}, stream, p);
}

void publish(uint32_t* flag, uint32_t value) {
  std::atomic_ref<uint32_t>(*flag).store(value, std::memory_order_release);
}

}  // namespace bequest::cuda
