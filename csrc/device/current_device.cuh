// What launchers ask the current device.
#pragma once

#include "device/launch.cuh"

namespace bequest::cuda {

inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check_cuda(cudaGetDevice(&device));
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

inline int multiprocessors() { return device_attribute(cudaDevAttrMultiProcessorCount); }

// Whether kernels that need Hopper's own instructions (warpgroup.cuh) can run.
inline bool is_hopper() { return device_attribute(cudaDevAttrComputeCapabilityMajor) == 9; }

}  // namespace bequest::cuda
