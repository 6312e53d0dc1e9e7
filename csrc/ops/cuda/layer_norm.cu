// Memory-bound: a row is read once into registers, summed there twice (the mean, then the squares around it:
// one pass would cancel where the mean is large), and written once. Small rows get a warp each, large ones a
// block; which of them depends on H alone, so the result is the same in any batch.
#include "device/launch.cuh"
#include "device/reductions.cuh"
#include "device/vectors.cuh"
#include "ops/cuda/layer_norm.h"
#include "ops/cuda/norm_row.cuh"

namespace bequest::cuda {
namespace {

// N vectors of W elements per thread; a row belongs to a warp or to the block.
template <class T, int W, int N, bool kWarpPerRow>
__global__ void layer_norm_kernel(const LayerNormParams p) {
  __shared__ float shared[2][kNormMaxThreads / kWarp];
  let_next_start();
  wait_for_previous();
  const auto [row, first, step] = NormPlace<kWarpPerRow>();
  if (kWarpPerRow && row >= p.num_tokens) return;
  const int num_vectors = static_cast<int>(p.hidden / W);
  const T* x = static_cast<const T*>(p.x) + row * p.hidden;
  T* residual = p.residual ? static_cast<T*>(p.residual) + row * p.hidden : nullptr;
  T* out = static_cast<T*>(p.out) + row * p.hidden;
  T* tapped = tap_row<T>(p.tap, row, p.hidden);

  float values[N][W] = {};
#pragma unroll
  for (int n = 0; n < N; ++n)
    if (first + n * step < num_vectors) load_vector<T, W>(x + (first + n * step) * W, values[n]);
  if (residual != nullptr) add_residual<T>(residual, values, first, step, num_vectors);
  if (tapped != nullptr && !p.tap.store_output) store_row<T>(tapped, values, first, step, num_vectors);

  float sum = 0;
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < W; ++i) sum += values[n][i];
  const float mean = row_sum<kWarpPerRow>(sum, shared[0]) / static_cast<float>(p.hidden);
  float square = 0;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    if (first + n * step >= num_vectors) continue;
#pragma unroll
    for (int i = 0; i < W; ++i) square += (values[n][i] - mean) * (values[n][i] - mean);
  }
  const float variance = row_sum<kWarpPerRow>(square, shared[1]) / static_cast<float>(p.hidden);
  const float scale = rsqrtf(variance + p.eps);

#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int at = (first + n * step) * W;
    if (first + n * step >= num_vectors) continue;
    float weight[W];
    float bias[W];
    load_constant<T, W>(static_cast<const T*>(p.weight) + at, weight);
    load_constant<T, W>(static_cast<const T*>(p.bias) + at, bias);
#pragma unroll
    for (int i = 0; i < W; ++i) values[n][i] = (values[n][i] - mean) * scale * weight[i] + bias[i];
    store_vector<T, W>(out + at, values[n]);
    if (tapped != nullptr && p.tap.store_output) store_vector<T, W>(tapped + at, values[n]);
  }
}

template <class T, int W>
void launch_width(const LayerNormParams& p, Stream stream) {
  const int64_t num_vectors = p.hidden / W;
  const auto by_warp = [&]<int N>() {
    const auto blocks = static_cast<unsigned>(ceil_div(p.num_tokens, kNormWarpsPerBlock));
    launch(layer_norm_kernel<T, W, N, true>,
           {.grid = blocks, .block = kNormWarpsPerBlock * kWarp, .overlaps_previous = true}, stream, p);
  };
  const auto by_block = [&]<int N>() {
    const auto threads = static_cast<unsigned>(round_up(ceil_div(num_vectors, N), kWarp));
    launch(layer_norm_kernel<T, W, N, false>,
           {.grid = static_cast<unsigned>(p.num_tokens), .block = threads, .overlaps_previous = true}, stream,
           p);
  };
  if (num_vectors <= kWarp) return by_warp.template operator()<1>();
  if (num_vectors <= 2 * kWarp) return by_warp.template operator()<2>();
  if (num_vectors <= 4 * kWarp) return by_warp.template operator()<4>();
  // Wide vectors take registers for no more than 512 threads.
  if (num_vectors <= (W == 1 ? 4 : 2) * kNormMaxThreads) return by_block.template operator()<4>();
  fail("layer_norm: the rows are too long");
}

}  // namespace

void layer_norm(const LayerNormParams& p, Stream stream) {
  check(p.num_tokens >= 0 && p.hidden >= 1, "layer_norm: empty rows");
  check(p.num_tokens == 0 || p.out != p.residual, "layer_norm: the result would overwrite the residual");
  check(in_range(p.tap), "layer_norm: tap out of range");
  dispatch(p.dtype, [&]<class T>() {
    constexpr int kWide = kVectorWidth<T>;
    const bool aligned = p.hidden % kWide == 0 && is_aligned(p.x, 16) && is_aligned(p.residual, 16) &&
                         is_aligned(p.weight, 16) && is_aligned(p.bias, 16) && is_aligned(p.out, 16) &&
                         is_aligned(p.tap.ring, 16);
    return aligned ? launch_width<T, kWide>(p, stream) : launch_width<T, 1>(p, stream);
  });
}

}  // namespace bequest::cuda
