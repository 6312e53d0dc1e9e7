// A block has a row: it finds the largest magnitude, then reads the row again, which the L1 still has.
#include <algorithm>

#include "device/launch.cuh"
#include "device/reductions.cuh"
#include "device/vectors.cuh"
#include "ops/cuda/float8_rows.cuh"

namespace bequest::cuda {
namespace {

constexpr int kWidth = kVectorWidth<BFloat16>;
constexpr int kMostThreads = 512;

__global__ void float8_rows_kernel(const Float8RowsParams p) {
  __shared__ float shared[kMostThreads / kWarp];
  let_next_start();
  wait_for_previous();
  const int64_t row = blockIdx.x, first = int64_t{threadIdx.x} * kWidth, step = int64_t{blockDim.x} * kWidth;
  const BFloat16* from = static_cast<const BFloat16*>(p.x) + row * p.width;
  float largest = 0;
  for (int64_t i = first; i < p.width; i += step) {
    float x[kWidth];
    load_vector<BFloat16, kWidth>(from + i, x);
#pragma unroll
    for (float value : x) largest = fmaxf(largest, fabsf(value));
  }
  largest = block_reduce(largest, shared, [](float a, float b) { return fmaxf(a, b); });
  const float scale = float8_scale(largest), factor = 1.0f / scale;
  if (threadIdx.x == 0) p.to.scales[row] = scale;
  Float8* to = static_cast<Float8*>(p.to.codes) + row * p.width;
  for (int64_t i = first; i < p.width; i += step) {
    float x[kWidth];
    load_vector<BFloat16, kWidth>(from + i, x);
#pragma unroll
    for (float& value : x) value *= factor;
    store_vector<Float8, kWidth>(to + i, x);
  }
}

}  // namespace

void float8_rows(const Float8RowsParams& p, Stream stream) {
  check(p.num_tokens >= 1 && p.width >= kWidth && p.width % kWidth == 0, "float8_rows: sizes");
  check(is_aligned(p.x, 16) && is_aligned(p.to.codes, 8),
        "float8_rows: rows are aligned to 16 bytes, codes to 8");
  const int64_t threads = std::min<int64_t>(round_up(ceil_div(p.width, kWidth), kWarp), kMostThreads);
  const LaunchShape shape{.grid = static_cast<unsigned>(p.num_tokens),
                          .block = static_cast<unsigned>(threads),
                          .overlaps_previous = true};
  launch(float8_rows_kernel, shape, stream, p);
}

}  // namespace bequest::cuda
