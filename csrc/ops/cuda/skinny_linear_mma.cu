// Weights that the chip can hold: a lane keeps its part in registers, all of it asked for before the
// predecessor has ended, so that little is left to be done when x is there.
//
// Tensor cores take rows of x as the 16 rows of a product and 8 outputs as its columns. The eight warps of a
// CTA share their outputs and divide k: a step is 256 of k, 32 for each warp. A sum does not care for the
// order of its terms, so a lane takes 8 neighbours along k of a row in one 16-byte access and calls them what
// the instruction wants them to be, the same for x and W: no shared memory and no shuffles on the way in. The
// warps' parts are added in a fixed order at the end.
//
// A norm needs no pass of its own: its weight is multiplied into x on the way, the sum of squares is one more
// result of the warps' parts, and what it comes to is a factor of the output.
#include <algorithm>

#include "device/current_device.cuh"
#include "device/launch.cuh"
#include "device/reductions.cuh"
#include "device/tensor_core.cuh"
#include "device/vectors.cuh"
#include "ops/cuda/activation.cuh"
#include "ops/cuda/skinny_linear.cuh"
#include "ops/cuda/skinny_norm.cuh"

namespace bequest::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kHalfRows = 8;     // of x: half a tile
constexpr int kTileOutputs = 8;  // rows of W
constexpr int kStride = kSkinnyDepthUnit / kSkinnyWidth;

// A weight: read once, and not by the neighbours.
__device__ __forceinline__ uint4 load_once(const uint4* p) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p));
  return v;
}

// What the warps leave for the end.
template <int Halves, int R>
struct Parts {
  float sums[kWarps][Halves * kHalfRows][R * kTileOutputs];
  float squares[kWarps][Halves * kHalfRows];
};

template <int Halves, int R>
__device__ __forceinline__ float total(const Parts<Halves, R>& parts, int row, int column) {
  float sum = 0;
#pragma unroll
  for (int part = 0; part < kWarps; ++part) sum += parts.sums[part][row][column];
  return sum;
}

// What a thread's first result is added to: asked for early, because everything is there when it is needed.
template <int R>
__device__ __forceinline__ float first_addend(const SkinnyLinearParams& p) {
  constexpr int kColumns = R * kTileOutputs;
  const int row = threadIdx.x / kColumns, column = threadIdx.x % kColumns;
  const SkinnyOutput output(p, static_cast<int>(blockIdx.x) * R + column / kTileOutputs,
                            column % kTileOutputs);
  if (p.result != SkinnyResult::kAdd || row >= p.num_tokens || !output.exists) return 0;
  return widen(static_cast<const BFloat16*>(p.out)[row * output.stride + output.index]);
}

// Adds the parts of the warps, always in the same order, and stores the results of a CTA. By the whole block.
template <int Halves, int R>
__device__ __forceinline__ void store_results(const Parts<Halves, R>& parts, const SkinnyLinearParams& p,
                                              float first_before) {
  constexpr int kColumns = R * kTileOutputs;
  const bool gated = p.result == SkinnyResult::kGate;
  const auto* bias = static_cast<const BFloat16*>(p.bias);
#pragma unroll 1
  for (int i = threadIdx.x; i < Halves * kHalfRows * kColumns; i += kThreads) {
    const int row = i / kColumns, column = i % kColumns;
    const SkinnyOutput output(p, static_cast<int>(blockIdx.x) * R + column / kTileOutputs,
                              column % kTileOutputs);
    if (row >= p.num_tokens || !output.exists) continue;
    BFloat16* to = static_cast<BFloat16*>(p.out) + row * output.stride + output.index;
    float before = first_before;
    if (p.result == SkinnyResult::kAdd && i >= kThreads) before = widen(*to);
    float scale = 1;
    if (p.norm_weight != nullptr) {
      float square = 0;
#pragma unroll
      for (int part = 0; part < kWarps; ++part) square += parts.squares[part][row];
      scale = rsqrtf(square / static_cast<float>(p.in_features) + p.eps);
    }
    float value = total(parts, row, column) * scale;
    if (bias != nullptr) value += widen(bias[output.index]);
    value = rounded<BFloat16>(value);
    if (gated) {
      float up = total(parts, row, column + kTileOutputs / 2) * scale;
      if (bias != nullptr) up += widen(bias[output.stride + output.index]);
      value = gate(p.activation, value, rounded<BFloat16>(up));
    }
    *to = narrow<BFloat16>(value + before);
  }
}

// A step of a warp: 32 of k of its rows of x by those of its weights.
template <int Halves, int R>
__device__ __forceinline__ void multiply_step(float (&sum)[(Halves + 1) / 2][R][4],
                                              const uint4 (&rows)[Halves], const uint4 (&weights)[R]) {
#pragma unroll
  for (int m = 0; m < (Halves + 1) / 2; ++m) {
    const uint4 low = rows[2 * m];
    const uint4 high = 2 * m + 1 < Halves ? rows[2 * m + 1 < Halves ? 2 * m + 1 : 0] : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      multiply_accumulate(sum[m][r], {low.x, high.x, low.y, high.y}, weights[r].x, weights[r].y);
      multiply_accumulate(sum[m][r], {low.z, high.z, low.w, high.w}, weights[r].z, weights[r].w);
    }
  }
}

// Leaves what a warp has summed for the end. `group`: the lane's row within 8; `quad`: its two columns.
template <int Halves, int R, bool kNorm>
__device__ __forceinline__ void leave_parts(Parts<Halves, R>& parts, int warp, int group, int quad,
                                            const float (&sum)[(Halves + 1) / 2][R][4],
                                            const float (&square)[Halves]) {
#pragma unroll
  for (int h = 0; h < Halves; ++h) {
    const int row = h * kHalfRows + group;
    if constexpr (kNorm) {
      const float all = quad_sum(square[h]);
      if (quad == 0) parts.squares[warp][row] = all;
    }
#pragma unroll
    for (int r = 0; r < R; ++r)
      *reinterpret_cast<float2*>(&parts.sums[warp][row][r * kTileOutputs + 2 * quad]) = {
          sum[h / 2][r][h % 2 * 2], sum[h / 2][r][h % 2 * 2 + 1]};
  }
}

// Halves of tiles of rows of x, R tiles of outputs per CTA, U steps of W in flight.
template <int Halves, int R, int U, bool kNorm>
__global__ __launch_bounds__(kThreads) void skinny_mma_kernel(const __grid_constant__ SkinnyLinearParams p) {
  __shared__ Parts<Halves, R> parts;
  let_next_start();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int group = lane / 4, quad = lane % 4;  // a lane's row within 8, and its place along k
  const int steps = static_cast<int>(p.in_features) / kSkinnyDepthUnit;
  const int64_t row_vectors = p.in_features / kSkinnyWidth;
  const uint4* w[R];
#pragma unroll
  for (int r = 0; r < R; ++r)
    w[r] = static_cast<const uint4*>(p.weight) +
           weight_row(p, static_cast<int>(blockIdx.x) * R + r, group) * row_vectors + warp * 4 + quad;
  uint4 weights[U][R];
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int r = 0; r < R; ++r)
      if (u < steps) weights[u][r] = load_once(w[r] + u * kStride);
  const uint4* gain = static_cast<const uint4*>(p.norm_weight) + warp * 4 + quad;
  uint4 gains[U];
#pragma unroll
  for (int u = 0; u < U; ++u)
    if (kNorm && u < steps) gains[u] = __ldg(gain + u * kStride);
  // Rows beyond the last are the last; nobody stores what becomes of them.
  const uint4* x[Halves];
#pragma unroll
  for (int h = 0; h < Halves; ++h)
    x[h] = static_cast<const uint4*>(p.x) + min(h * kHalfRows + group, p.num_tokens - 1) * row_vectors +
           warp * 4 + quad;
  float sum[(Halves + 1) / 2][R][4] = {};
  float square[Halves] = {};
  wait_for_previous();
  const float before = first_addend<R>(p);
#pragma unroll 1
  for (int begin = 0; begin < steps; begin += U) {
    uint4 rows[U][Halves];  // of x, all asked for at once: each would else wait for the L2 in turn
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int h = 0; h < Halves; ++h)
        if (begin + u < steps) rows[u][h] = __ldcg(x[h] + (begin + u) * kStride);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (begin + u >= steps) break;
#pragma unroll
      for (int h = 0; kNorm && h < Halves; ++h) rows[u][h] = weighted(rows[u][h], gains[u], square[h]);
      if (kNorm && begin + u + U < steps) gains[u] = __ldg(gain + (begin + u + U) * kStride);
      multiply_step<Halves, R>(sum, rows[u], weights[u]);
#pragma unroll
      for (int r = 0; r < R; ++r)
        if (begin + u + U < steps) weights[u][r] = load_once(w[r] + (begin + u + U) * kStride);
    }
  }
  leave_parts<Halves, R, kNorm>(parts, warp, group, quad, sum, square);
  __syncthreads();
  store_results(parts, p, before);
  if (kNorm && p.tap.ring_rows != nullptr) tap_rows(p, p.x, static_cast<int>(threadIdx.x), kThreads);
}

template <int Halves, int R, int U>
void launch_tiles(const SkinnyLinearParams& p, int64_t tiles, Stream stream) {
  const LaunchShape shape{
      .grid = static_cast<unsigned>(ceil_div(tiles, R)), .block = kThreads, .overlaps_previous = true};
  if constexpr (Halves <= 2)
    if (p.norm_weight != nullptr) return launch(skinny_mma_kernel<Halves, R, U, true>, shape, stream, p);
  launch(skinny_mma_kernel<Halves, R, U, false>, shape, stream, p);
}

// As few tiles per CTA as leave it a multiprocessor, and as many steps of them in flight as registers hold.
template <int Halves>
void launch_rows(const SkinnyLinearParams& p, Stream stream) {
  const int64_t tiles = skinny_tiles(p), each = ceil_div(tiles, multiprocessors());
  const int64_t steps = p.in_features / kSkinnyDepthUnit;
  if (each <= 1 && steps <= 4) return launch_tiles<Halves, 1, 4>(p, tiles, stream);
  if constexpr (Halves == 1)
    if (each <= 1 && steps > 8) return launch_tiles<Halves, 1, 12>(p, tiles, stream);
  if (each <= 1) return launch_tiles<Halves, 1, 8>(p, tiles, stream);
  if (each <= 2) return launch_tiles<Halves, 2, 4>(p, tiles, stream);
  if (each <= 4) return launch_tiles<Halves, 4, 4>(p, tiles, stream);
  launch_tiles<Halves, 6, 4>(p, tiles, stream);
}

}  // namespace

void skinny_linear_mma(const SkinnyLinearParams& p, Stream stream) {
  if (p.num_tokens <= kHalfRows) return launch_rows<1>(p, stream);
  if (p.num_tokens <= 2 * kHalfRows) return launch_rows<2>(p, stream);
  launch_tiles<4, 2, 8>(p, skinny_tiles(p), stream);
}

}  // namespace bequest::cuda
