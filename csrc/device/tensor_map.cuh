// Tensors as the copy engine sees them.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "device/launch.cuh"

namespace bequest::cuda {

using EncodeTensorMap = decltype(&cuTensorMapEncodeTiled);

// Through the runtime, so that the extension needs no driver library to be loaded.
inline EncodeTensorMap tensor_map_encoder() {
  static const EncodeTensorMap encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                                &found));
    check(found == cudaDriverEntryPointSuccess, "the driver has no tensor maps");
    return reinterpret_cast<EncodeTensorMap>(function);
  }();
  return encode;
}

}  // namespace bequest::cuda
