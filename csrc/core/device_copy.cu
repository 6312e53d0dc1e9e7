#include "core/device_copy.h"

#include "core/cuda.cuh"

namespace bequest::cuda {

void copy_async(void* to, const void* from, size_t bytes, Stream stream) {
  check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
}

}  // namespace bequest::cuda
