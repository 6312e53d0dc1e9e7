#include <cuda.h>

#include <atomic>

#include "core/cuda.cuh"
#include "ops/late_copy_cuda.h"

namespace bequest::cuda {
namespace {

using WaitValue = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned);

// Through the runtime, so that the extension needs no driver library to be loaded.
WaitValue wait_function() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check_cuda(
      cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", &function, 12000, cudaEnableDefault, &found));
  check(found == cudaDriverEntryPointSuccess, "the driver cannot let a stream wait for memory");
  return reinterpret_cast<WaitValue>(function);
}

}  // namespace

// Not a kernel that waits and copies: reading the host's memory by loads took four times as long as the copy
// engine takes, and the sampling of the step waits for it.
void late_copy(const LateCopyParams& p, Stream stream) {
  static const WaitValue wait = wait_function();
  const CUresult queued =
      wait(stream, reinterpret_cast<CUdeviceptr>(p.flag), p.value, CU_STREAM_WAIT_VALUE_EQ);
  check(queued == CUDA_SUCCESS, "the driver refused to let a stream wait for memory");
  check_cuda(cudaMemcpyAsync(p.destination, p.source, p.num_bytes, cudaMemcpyHostToDevice, stream));
}

void publish(uint32_t* flag, uint32_t value) {
  std::atomic_ref<uint32_t>(*flag).store(value, std::memory_order_release);
}

}  // namespace bequest::cuda
