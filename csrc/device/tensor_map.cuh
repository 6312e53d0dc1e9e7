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

// What the L2 asks memory for where a ring asks for 128 bytes of many rows, one line of a row behind another.
// With 256 bytes it would bring the next line, too, long before that is asked for.
inline constexpr CUtensorMapL2promotion kLineFetch = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;

}  // namespace bequest::cuda
