// Memory-bound: a row is read once into registers, summed there (for a layer norm twice: the mean, then the
// squares around it, since one pass would cancel where the mean is large), and written once. Small rows get a
// warp each (no barrier), large ones a block. Which of them depends on H alone, never on T: the order of
// additions, and so the result, is the same in any batch.
#include "ops/cuda/norm.h"

#include <type_traits>

#include "device/launch.cuh"
#include "device/reductions.cuh"
#include "device/vectors.cuh"
#include "ops/cuda/float8_rows.cuh"
#include "ops/cuda/hidden_tap.cuh"
#include "ops/cuda/norm_row.cuh"

namespace bequest::cuda {
namespace {

// The mean is subtracted, and a bias added.
template <class Params>
inline constexpr bool kCentres = std::is_same_v<Params, LayerNormParams>;

__host__ __device__ __forceinline__ int64_t row_stride(const RmsNormParams& p) { return p.stride; }
__host__ __device__ __forceinline__ int64_t row_stride(const LayerNormParams& p) { return p.hidden; }

// The result may go to rows in e4m3.
template <class Params, class T, int W>
inline constexpr bool kMakesCodes = !kCentres<Params> && std::is_same_v<T, BFloat16> && W > 1;

// The row as it is here, if its token asked for it.
template <class Params, class T, int W, int N, bool kWarpPerRow>
__device__ __forceinline__ void tap(const RowPlace<W, N, kWarpPerRow>& place, const Params& p,
                                    const Packed<T, W> (&row)[N]) {
  T* const to = tap_row<T>(p.tap, place.row(), p.hidden);
  if (to != nullptr) place.for_each_vector([&](int n, int at) { store_packed<T, W>(to + at, row[n]); });
}

template <int W, int N, bool kWarpPerRow>
inline constexpr int kMostThreads = kWarpPerRow       ? kRowWarpsPerBlock * kWarp
                                    : W == 1 && N > 2 ? kNormMaxThreads
                                                      : 512;
// Of two vectors per thread as many rows are on the chip as 40 registers allow.
template <int N, bool kWarpPerRow>
inline constexpr int kLeastBlocks = N == 2 && !kWarpPerRow ? 3 : 1;

template <class Params, class T, int W, int N, bool kWarpPerRow>
__global__ void __launch_bounds__(kMostThreads<W, N, kWarpPerRow>, kLeastBlocks<N, kWarpPerRow>)
    norm_kernel(const Params p) {
  constexpr bool kCentred = kCentres<Params>;
  __shared__ float shared[2][kNormMaxThreads / kWarp];
  let_next_start();
  const RowPlace<W, N, kWarpPerRow> place(p.hidden);
  const int64_t at_row = place.row();
  if (kWarpPerRow && at_row >= p.num_tokens) return wait_for_previous();
  const T* const weights = static_cast<const T*>(p.weight);
  const T* const x = static_cast<const T*>(p.x) + at_row * row_stride(p);
  T* const residual = static_cast<T*>(p.residual) + at_row * p.hidden;

  Packed<T, W> row[N], added[N], weight[N];
  wait_for_previous();
  // All loads before the first store: the compiler cannot tell that the residual and x are apart.
  load_row(place, x, row);
  if (p.residual != nullptr) load_row(place, residual, added);
  // The weight is asked for now too, so that its latency is not added to the reduction's. With a bias beside
  // it there would be too few registers.
  if constexpr (!kCentred)
    place.for_each_vector([&](int n, int at) { weight[n] = load_packed_constant<T, W>(weights + at); });
  if (p.residual != nullptr) add_residual(place, added, residual, row);
  if (!p.tap.store_output) tap(place, p, row);

  const auto hidden = static_cast<float>(p.hidden);
  float mean = 0;
  if constexpr (kCentred) mean = sum_row(place, row, shared[1], [](float x) { return x; }) / hidden;
  const float squares = sum_row(place, row, shared[0], [mean](float x) { return (x - mean) * (x - mean); });
  const float scale = rsqrtf(squares / hidden + p.eps);

  T* const out = static_cast<T*>(p.out) + at_row * row_stride(p);
  place.for_each_vector([&](int n, int at) {
    float values[W], factors[W], bias[W];
    unpack<T, W>(row[n], values);
    if constexpr (kCentred) {
      load_constant<T, W>(weights + at, factors);
      load_constant<T, W>(static_cast<const T*>(p.bias) + at, bias);
    } else {
      unpack<T, W>(weight[n], factors);
#pragma unroll
      for (float& factor : factors) factor += p.offset;
    }
#pragma unroll
    for (int i = 0; i < W; ++i) {
      values[i] = (values[i] - mean) * scale * factors[i];
      if constexpr (kCentred) values[i] += bias[i];
    }
    row[n] = pack<T, W>(values);
    if (p.out != nullptr) store_packed<T, W>(out + at, row[n]);
  });
  if (p.tap.store_output) tap(place, p, row);
  if constexpr (kMakesCodes<Params, T, W>)
    if (p.codes.codes != nullptr) store_float8(place, p.codes, p.hidden, row, shared[1]);
}

constexpr int kTapThreads = 128;

template <class T, int W>
__global__ void tap_kernel(const TapParams p) {
  let_next_start();
  wait_for_previous();
  const int64_t row = blockIdx.x;
  T* tapped = tap_row<T>(p.tap, row, p.hidden);
  if (tapped == nullptr) return;
  const T* from = static_cast<const T*>(p.x) + row * p.hidden;
  for (int64_t i = int64_t{threadIdx.x} * W; i < p.hidden; i += int64_t{blockDim.x} * W) {
    float values[W];
    load_vector<T, W>(from + i, values);
    store_vector<T, W>(tapped + i, values);
  }
}

template <class T, int W, int N, class Params>
void launch_by_warp(const Params& p, Stream stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(p.num_tokens, kRowWarpsPerBlock));
  launch(norm_kernel<Params, T, W, N, true>,
         {.grid = blocks, .block = kRowWarpsPerBlock * kWarp, .overlaps_previous = true}, stream, p);
}

template <class T, int W, int N, class Params>
void launch_by_block(const Params& p, Stream stream) {
  const auto threads = static_cast<unsigned>(round_up(ceil_div(p.hidden / W, N), kWarp));
  launch(norm_kernel<Params, T, W, N, false>,
         {.grid = static_cast<unsigned>(p.num_tokens), .block = threads, .overlaps_previous = true}, stream,
         p);
}

// Rows of more vectors than warps take.
template <class T, int W>
void launch_long(const RmsNormParams& p, Stream stream) {
  const int64_t num_vectors = p.hidden / W;
  if (num_vectors <= 2 * 512) return launch_by_block<T, W, 2>(p, stream);
  // There are registers for no more threads than that.
  if (num_vectors <= 4 * 512) return launch_by_block<T, W, 4>(p, stream);
  if constexpr (W == 1)
    if (num_vectors <= 8 * kNormMaxThreads) return launch_by_block<T, W, 8>(p, stream);
  fail("rms_norm: the rows are too long");
}

template <class T, int W>
void launch_long(const LayerNormParams& p, Stream stream) {
  // Wide vectors take registers for no more than 512 threads.
  if (p.hidden / W <= (W == 1 ? 4 : 2) * kNormMaxThreads) return launch_by_block<T, W, 4>(p, stream);
  fail("layer_norm: the rows are too long");
}

template <class T, int W, class Params>
void launch_width(const Params& p, Stream stream) {
  const int64_t num_vectors = p.hidden / W;
  if (num_vectors <= kWarp) return launch_by_warp<T, W, 1>(p, stream);
  if (num_vectors <= 2 * kWarp) return launch_by_warp<T, W, 2>(p, stream);
  if (num_vectors <= 4 * kWarp) return launch_by_warp<T, W, 4>(p, stream);
  launch_long<T, W>(p, stream);
}

bool is_bias_aligned(const RmsNormParams&) { return true; }
bool is_bias_aligned(const LayerNormParams& p) { return is_aligned(p.bias, 16); }

template <class T, class Params>
bool is_aligned_norm(const Params& p) {
  constexpr int kWide = kVectorWidth<T>;
  return p.hidden % kWide == 0 && row_stride(p) % kWide == 0 && is_aligned(p.x, 16) &&
         is_aligned(p.residual, 16) && is_aligned(p.weight, 16) && is_bias_aligned(p) &&
         is_aligned(p.out, 16) && is_aligned(p.tap.ring, 16);
}

template <class Params>
void norm(const Params& p, Stream stream) {
  check(p.num_tokens >= 0 && p.hidden >= 1, "norm: empty rows");
  check(p.num_tokens == 0 || p.out == nullptr || p.out != p.residual,
        "norm: the result would overwrite the residual");
  check(in_range(p.tap), "norm: tap out of range");
  dispatch(p.dtype, [&]<class T>() {
    constexpr int kWide = kVectorWidth<T>;
    return is_aligned_norm<T>(p) ? launch_width<T, kWide>(p, stream) : launch_width<T, 1>(p, stream);
  });
}

}  // namespace

void rms_norm(const RmsNormParams& p, Stream stream) {
  check(p.num_tokens <= 1 || p.stride >= p.hidden, "norm: rows overlap");
  check(p.codes.codes == nullptr ||
            (p.dtype == DType::kBF16 && is_aligned(p.codes.codes, 8) && is_aligned_norm<BFloat16>(p)),
        "norm: codes are of aligned rows in bfloat16");
  norm(p, stream);
}

void layer_norm(const LayerNormParams& p, Stream stream) { norm(p, stream); }

void tap_rows(const TapParams& p, Stream stream) {
  check(p.num_tokens >= 0 && p.hidden >= 1, "tap: empty rows");
  check(p.tap.ring_rows != nullptr && in_range(p.tap), "tap: out of range");
  if (p.num_tokens == 0) return;
  dispatch(p.dtype, [&]<class T>() {
    constexpr int kWide = kVectorWidth<T>;
    const bool aligned = p.hidden % kWide == 0 && is_aligned(p.x, 16) && is_aligned(p.tap.ring, 16);
    const LaunchShape shape{
        .grid = static_cast<unsigned>(p.num_tokens), .block = kTapThreads, .overlaps_previous = true};
    if (aligned) return launch(tap_kernel<T, kWide>, shape, stream, p);
    launch(tap_kernel<T, 1>, shape, stream, p);
  });
}

}  // namespace bequest::cuda
