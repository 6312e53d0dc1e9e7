// Launches, their checks, and how consecutive kernels overlap.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <source_location>
#include <string>

#include "core/check.h"
#include "device/stream.h"

namespace bequest::cuda {

inline void check_cuda(cudaError_t status, std::source_location where = std::source_location::current()) {
  if (status != cudaSuccess) [[unlikely]]
    fail(std::string("CUDA: ") + cudaGetErrorString(status), where);
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

inline bool is_aligned(const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

struct LaunchShape {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;  // dynamic
  unsigned cluster = 1;     // CTAs per cluster, along x
  // The grid may start beside its predecessor in the stream; it calls wait_for_previous() before it touches
  // anything that the predecessor reads or writes.
  bool overlaps_previous = false;
};

namespace detail {

// A launch as the runtime is told of it.
class LaunchConfig {
 public:
  LaunchConfig(const LaunchShape& shape, Stream stream) {
    config_.gridDim = shape.grid;
    config_.blockDim = shape.block;
    config_.dynamicSmemBytes = shape.shared_bytes;
    config_.stream = stream;
    config_.attrs = attributes_;
    if (shape.cluster > 1) {
      attributes_[config_.numAttrs].id = cudaLaunchAttributeClusterDimension;
      attributes_[config_.numAttrs++].val.clusterDim = {shape.cluster, 1, 1};
    }
    if (shape.overlaps_previous) {
      attributes_[config_.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes_[config_.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
  }
  LaunchConfig(const LaunchConfig&) = delete;

  const cudaLaunchConfig_t* get() const { return &config_; }

 private:
  cudaLaunchAttribute attributes_[2] = {};
  cudaLaunchConfig_t config_{};
};

template <class... Params>
void allow_shared_bytes(void (*kernel)(Params...), size_t bytes) {
  constexpr size_t kWithoutAsking = 32 * 1024;  // 48 KiB with what is static
  if (bytes > kWithoutAsking)
    check_cuda(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
}

}  // namespace detail

// Launches and checks the launch. An empty grid is no work and no launch.
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), const LaunchShape& shape, Stream stream, Args... args) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
  detail::allow_shared_bytes(kernel, shape.shared_bytes);
  const detail::LaunchConfig config(shape, stream);
  check_cuda(cudaLaunchKernelEx(config.get(), kernel, static_cast<Params>(args)...));
}

// How many clusters of such a launch have room on the device at once.
template <class... Params>
int clusters_at_once(void (*kernel)(Params...), LaunchShape shape) {
  shape.overlaps_previous = false;
  detail::allow_shared_bytes(kernel, shape.shared_bytes);
  int clusters = 0;
  const detail::LaunchConfig config(shape, nullptr);
  check_cuda(cudaOccupancyMaxActiveClusters(&clusters, kernel, config.get()));
  return clusters;
}

// Whether what is launched becomes a graph. That begins when all before it has ended; launches one by one
// overlap with what came before them.
inline bool is_captured(Stream stream) {
  cudaStreamCaptureStatus capture{};
  check_cuda(cudaStreamIsCapturing(stream, &capture));
  return capture == cudaStreamCaptureStatusActive;
}

// Until the grid before this one has ended and its results can be read.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The grid after this one may be brought onto the chip; its wait_for_previous() still waits for our end.
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }

}  // namespace bequest::cuda
