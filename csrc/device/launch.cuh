// Launches a kernel and checks that the launch was accepted.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "core/check.h"

namespace bequest {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  fail(std::string(what) + ": " + cudaGetErrorString(status));
}

// kPrevious: the grid may start beside its predecessor in the stream, whose results it reads only after
// griddepcontrol.wait.
enum class Overlap { kNone, kPrevious };

template <class... Params>
struct Launch {
  void (*kernel)(Params...);
  dim3 grid;
  int threads;
  size_t shared_bytes;
  Overlap overlap = Overlap::kNone;
};
template <class... Params>
Launch(void (*)(Params...), dim3, int, size_t, Overlap) -> Launch<Params...>;
template <class... Params>
Launch(void (*)(Params...), dim3, int, size_t) -> Launch<Params...>;

template <class... Params, class... Arguments>
void launch_kernel(const Launch<Params...>& launch, cudaStream_t stream, Arguments&&... arguments) {
  constexpr size_t kDefaultLimit = 48 * 1024;
  if (launch.shared_bytes > kDefaultLimit)
    check_cuda(cudaFuncSetAttribute(launch.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(launch.shared_bytes)),
               "shared memory of an attention kernel");
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = launch.grid;
  config.blockDim = dim3(launch.threads);
  config.dynamicSmemBytes = launch.shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = launch.overlap == Overlap::kPrevious ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, launch.kernel, std::forward<Arguments>(arguments)...),
             "launch of an attention kernel");
}

}  // namespace bequest
