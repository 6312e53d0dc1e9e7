// Memory-bound: a row is read once into registers, summed there, and written once. Small rows get a warp each
// (no barrier), large ones a block. Which of them depends on H alone, never on T: the order of additions, and
// so the result, is the same in any batch.
#include "device/launch.cuh"
#include "device/reductions.cuh"
#include "device/vectors.cuh"
#include "ops/cuda/norm.h"
#include "ops/cuda/norm_row.cuh"

namespace bequest::cuda {
namespace {

// N vectors of W elements per thread; a row belongs to a warp or to the block.
template <class T, int W, int N, bool kWarpPerRow>
__global__ void rms_norm_kernel(const RmsNormParams p) {
  let_next_start();
  wait_for_previous();
  const auto [row, first, step] = NormPlace<kWarpPerRow>();
  if (kWarpPerRow && row >= p.num_tokens) return;
  const int num_vectors = static_cast<int>(p.hidden / W);
  const T* x = static_cast<const T*>(p.x) + row * p.hidden;
  T* residual = p.residual ? static_cast<T*>(p.residual) + row * p.hidden : nullptr;
  const T* weight = static_cast<const T*>(p.weight);
  T* out = static_cast<T*>(p.out) + row * p.hidden;
  T* tapped = tap_row<T>(p.tap, row, p.hidden);

  // The weight is asked for now too, so that its latency is not added to the reduction's.
  float values[N][W];
  float scales[N][W];
#pragma unroll
  for (int n = 0; n < N; ++n)
    if (first + n * step < num_vectors) load_vector<T, W>(x + (first + n * step) * W, values[n]);
#pragma unroll
  for (int n = 0; n < N; ++n)
    if (first + n * step < num_vectors) load_constant<T, W>(weight + (first + n * step) * W, scales[n]);
  if (residual != nullptr) add_residual<T>(residual, values, first, step, num_vectors);
  if (tapped != nullptr && !p.tap.store_output) store_row<T>(tapped, values, first, step, num_vectors);

  float square = 0;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    if (first + n * step >= num_vectors) continue;
#pragma unroll
    for (int i = 0; i < W; ++i) square += values[n][i] * values[n][i];
  }
  __shared__ float shared[kNormMaxThreads / kWarp];
  square = row_sum<kWarpPerRow>(square, shared);
  const float scale = rsqrtf(square / static_cast<float>(p.hidden) + p.eps);

#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int at = (first + n * step) * W;
    if (first + n * step >= num_vectors) continue;
#pragma unroll
    for (int i = 0; i < W; ++i) values[n][i] = values[n][i] * scale * scales[n][i];
    store_vector<T, W>(out + at, values[n]);
    if (tapped != nullptr && p.tap.store_output) store_vector<T, W>(tapped + at, values[n]);
  }
}

template <class T, int W>
void launch_width(const RmsNormParams& p, Stream stream) {
  const int64_t num_vectors = p.hidden / W;
  const auto tokens = static_cast<unsigned>(p.num_tokens);
  const auto by_warp = [&]<int N>() {
    const unsigned blocks = static_cast<unsigned>(ceil_div(p.num_tokens, kNormWarpsPerBlock));
    launch(rms_norm_kernel<T, W, N, true>,
           {.grid = blocks, .block = kNormWarpsPerBlock * kWarp, .overlaps_previous = true}, stream, p);
  };
  const auto by_block = [&]<int N>() {
    const auto threads = static_cast<unsigned>(round_up(ceil_div(num_vectors, N), kWarp));
    launch(rms_norm_kernel<T, W, N, false>, {.grid = tokens, .block = threads, .overlaps_previous = true},
           stream, p);
  };
  if (num_vectors <= kWarp) return by_warp.template operator()<1>();
  if (num_vectors <= 2 * kWarp) return by_warp.template operator()<2>();
  if (num_vectors <= 4 * kWarp) return by_warp.template operator()<4>();
  if (num_vectors <= 2 * 512) return by_block.template operator()<2>();
  if (num_vectors <= 4 * 512)
    return by_block.template operator()<4>();  // 94 registers: no more threads than that
  if constexpr (W == 1)
    if (num_vectors <= 8 * kNormMaxThreads) return by_block.template operator()<8>();
  fail("rms_norm: the rows are too long");
}

}  // namespace

void rms_norm(const RmsNormParams& p, Stream stream) {
  check(p.num_tokens >= 0 && p.hidden >= 1, "rms_norm: empty rows");
  check(p.num_tokens == 0 || p.out != p.residual, "rms_norm: the result would overwrite the residual");
  check(in_range(p.tap), "rms_norm: tap out of range");
  dispatch(p.dtype, [&]<class T>() {
    constexpr int kWide = kVectorWidth<T>;
    const bool aligned = p.hidden % kWide == 0 && is_aligned(p.x, 16) && is_aligned(p.residual, 16) &&
                         is_aligned(p.weight, 16) && is_aligned(p.out, 16) && is_aligned(p.tap.ring, 16);
    return aligned ? launch_width<T, kWide>(p, stream) : launch_width<T, 1>(p, stream);
  });
}

}  // namespace bequest::cuda
