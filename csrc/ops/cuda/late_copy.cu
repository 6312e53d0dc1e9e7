#include "ops/cuda/late_copy.h"

#include "device/exchange.cuh"
#include "device/launch.cuh"

namespace bequest::cuda {
namespace {

constexpr unsigned kPauseNanoseconds = 200;

// One thread: other work goes on beside it.
__global__ void __launch_bounds__(1) wait_kernel(const uint32_t* flag, uint32_t value) {
  while (load_acquire_from_host(flag) != value) __nanosleep(kPauseNanoseconds);
}

void wait_for_flag(const uint32_t* flag, uint32_t value, Stream stream) {
  launch(wait_kernel, {1, 1}, stream, flag, value);
}

void copy_in(void* to, const void* from, size_t num_bytes, Stream stream) {
  check_cuda(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyHostToDevice, stream));
}

}  // namespace

void LateCopy::Free::operator()(CUevent_st* event) const { cudaEventDestroy(event); }

LateCopy::Event LateCopy::new_event() {
  cudaEvent_t event = nullptr;
  check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return Event(event);
}

LateCopy::LateCopy(const LateCopyPlaces& places)
    : places_(places), passed_(new_event()), copied_(new_event()) {}

bool LateCopy::done() const {
  const cudaError_t status = cudaEventQuery(copied_.get());
  if (status == cudaErrorNotReady) {
    cudaGetLastError();  // or whoever asks for the last error next finds this one
    return false;
  }
  check_cuda(status);
  return true;
}

void LateCopy::settle() { check_cuda(cudaEventSynchronize(copied_.get())); }

void LateCopy::pass(Stream stream) { check_cuda(cudaEventRecord(passed_.get(), stream)); }

void LateCopy::queue(int64_t num_bytes, uint32_t value, Stream stream) {
  pass(stream);
  send(num_bytes, value, stream);
}

void LateCopy::queue_beside(const LateCopy& before, int64_t num_bytes, uint32_t value, Stream beside,
                            Stream stream) {
  pass(stream);
  check_cuda(cudaStreamWaitEvent(beside, before.passed_.get()));
  send(num_bytes, value, beside);
  wait_for_flag(places_.arrived, value, stream);
}

void LateCopy::send(int64_t num_bytes, uint32_t value, Stream stream) {
  wait_for_flag(places_.flag, value, stream);
  copy_in(places_.destination, places_.source, static_cast<size_t>(num_bytes), stream);
  copy_in(places_.arrived, places_.flag, sizeof(uint32_t), stream);
  check_cuda(cudaEventRecord(copied_.get(), stream));
}

}  // namespace bequest::cuda
