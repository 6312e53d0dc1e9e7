// Five rows and more: tensor cores, with rows of x as the 16 rows of a product and 8 outputs as its columns.
// The eight warps of a CTA share their outputs and divide k: a step is 256 of k, 32 for each warp. A sum does
// not care for the order of its terms, so a lane takes 8 neighbours along k of a row in one 16-byte access
// and calls them what the instruction wants them to be, the same for x and W: no shared memory and no
// shuffles on the way in. The warps' parts are added in a fixed order at the end. As with fewer rows, the
// first weights are asked for before the predecessor has ended. Bound by the bytes of W, and by those of x,
// which every CTA reads from the L2: more outputs per CTA read it less often, as long as there are CTAs for
// the whole chip.
#include "core/cuda.cuh"
#include "ops/skinny_linear.cuh"

namespace bequest::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kTileRows = 16;    // of x
constexpr int kTileOutputs = 8;  // rows of W
// Outputs. Below kNarrow a multiprocessor has one CTA at most, which may as well take the registers for eight
// steps in flight; from kWide on there are enough of four tiles for two on each.
constexpr int64_t kNarrow = 2048, kWide = 5120;

__device__ __forceinline__ void multiply_add(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                             uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Adds the parts of the warps, always in the same order, and stores the results from output `first` on. By
// the whole block.
template <int Rows, int Outputs>
__device__ __forceinline__ void store_sums(const float (&parts)[kWarps][Rows][Outputs], int64_t first,
                                           const SkinnyLinearParams& p) {
  for (int i = threadIdx.x; i < Rows * Outputs; i += kWarps * kWarp) {
    const int row = i / Outputs, column = i % Outputs;
    const int64_t output = first + column;
    if (row >= p.num_tokens || output >= p.out_features) continue;
    float total = 0;
#pragma unroll
    for (int part = 0; part < kWarps; ++part) total += parts[part][row][column];
    if (p.bias != nullptr) total += widen(static_cast<const BFloat16*>(p.bias)[output]);
    static_cast<BFloat16*>(p.out)[row * p.out_features + output] = narrow<BFloat16>(total);
  }
}

// M tiles of rows of x, R tiles of outputs per CTA, U steps of W in flight.
template <int M, int R, int U>
__global__ __launch_bounds__(kWarps* kWarp,
                             R == 4 ? 2 : 1) void skinny_mma_kernel(const SkinnyLinearParams p) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int group = lane / 4, quad = lane % 4;  // a lane's row within 8, and its place along k
  const int64_t first = int64_t{blockIdx.x} * R * kTileOutputs;
  const int steps = static_cast<int>(p.in_features / kSkinnyDepthUnit);
  const int64_t row_vectors = p.in_features / kSkinnyWidth;
  // Rows and outputs beyond the last read the last one; nobody stores what becomes of it.
  const uint4* w[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int64_t row = min(first + r * kTileOutputs + group, p.out_features - 1);
    w[r] = static_cast<const uint4*>(p.weight) + row * row_vectors + warp * 4 + quad;
  }
  const uint4* x[2 * M];
#pragma unroll
  for (int m = 0; m < 2 * M; ++m)
    x[m] =
        static_cast<const uint4*>(p.x) + min(m * 8 + group, p.num_tokens - 1) * row_vectors + warp * 4 + quad;
  uint4 weights[U][R];
  const auto fetch = [&](int step, int u) {
#pragma unroll
    for (int r = 0; r < R; ++r) weights[u][r] = load_once(w[r] + step * kWarp);
  };
#pragma unroll
  for (int u = 0; u < U; ++u)
    if (u < steps) fetch(u, u);
  let_next_start();
  wait_for_previous();
  float sum[M][R][4] = {};
  for (int begin = 0; begin < steps; begin += U) {
    uint4 rows[U][2 * M];  // of x, all asked for at once: each would else wait for the L2 in turn
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int m = 0; m < 2 * M; ++m)
        if (begin + u < steps) rows[u][m] = x[m][(begin + u) * kWarp];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (begin + u >= steps) break;
#pragma unroll
      for (int m = 0; m < M; ++m) {
        const uint4 low = rows[u][2 * m], high = rows[u][2 * m + 1];
#pragma unroll
        for (int r = 0; r < R; ++r) {
          multiply_add(sum[m][r], low.x, high.x, low.y, high.y, weights[u][r].x, weights[u][r].y);
          multiply_add(sum[m][r], low.z, high.z, low.w, high.w, weights[u][r].z, weights[u][r].w);
        }
      }
      if (begin + u + U < steps) fetch(begin + u + U, u);
    }
  }
  __shared__ float parts[kWarps][M * kTileRows][R * kTileOutputs];
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<float2*>(
            &parts[warp][m * kTileRows + half * 8 + group][r * kTileOutputs + 2 * quad]) = {
            sum[m][r][2 * half], sum[m][r][2 * half + 1]};
  __syncthreads();
  store_sums(parts, first, p);
}

template <int M, int R, int U>
void launch_tiles(const SkinnyLinearParams& p, Stream stream) {
  const LaunchShape shape{.grid = static_cast<unsigned>(ceil_div(p.out_features, R * kTileOutputs)),
                          .block = kWarps * kWarp,
                          .overlaps_previous = true};
  launch(skinny_mma_kernel<M, R, U>, shape, stream, p);
}

}  // namespace

void skinny_linear_mma(const SkinnyLinearParams& p, Stream stream) {
  if (p.num_tokens > kTileRows) return launch_tiles<2, 2, 8>(p, stream);
  if (p.out_features < kNarrow) return launch_tiles<1, 2, 8>(p, stream);
  if (p.out_features < kWide) return launch_tiles<1, 2, 4>(p, stream);
  launch_tiles<1, 4, 2>(p, stream);
}

}  // namespace bequest::cuda
