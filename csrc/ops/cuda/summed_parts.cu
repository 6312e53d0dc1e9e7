#include "ops/cuda/summed_parts.h"

#include "core/dtype.h"
#include "device/launch.cuh"
#include "device/vectors.cuh"

namespace bequest::cuda {
namespace {

constexpr int kThreads = 256;

// kWidth: neighbours of a thread, which N is a multiple of
template <int kWidth>
__global__ void sum_parts_kernel(const SummedParts p) {
  let_next_start();
  wait_for_previous();
  const int64_t at = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWidth, size = p.num_rows * p.outputs;
  if (at >= size) return;
  float sums[kWidth] = {};
#pragma unroll 4
  for (int piece = 0; piece < p.pieces; ++piece) {
    float part[kWidth];
    load_vector(p.parts + piece * size + at, part);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sums[i] += part[i];
  }
  if (p.bias != nullptr)
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      sums[i] += widen(static_cast<const BFloat16*>(p.bias)[at % p.outputs + i]);
  store_vector(static_cast<BFloat16*>(p.out) + at, sums);
}

}  // namespace

void sum_parts(const SummedParts& p, Stream stream) {
  const bool has_pairs = p.outputs % 2 == 0;
  const int64_t threads = p.num_rows * p.outputs / (has_pairs ? 2 : 1);
  launch(has_pairs ? sum_parts_kernel<2> : sum_parts_kernel<1>,
         {.grid = static_cast<unsigned>(ceil_div(threads, kThreads)),
          .block = kThreads,
          .overlaps_previous = true},
         stream, p);
}

}  // namespace bequest::cuda
