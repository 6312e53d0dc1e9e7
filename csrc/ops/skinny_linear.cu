// One to four rows: a warp has R rows of W and walks along k, 512 bytes of each row at a time; the T rows of
// x come from L1. The first weights are asked for before the kernel waits for its predecessor: they depend on
// nothing, and so the start of each product hides behind the end of what comes before it. Bound by the bytes
// of W: N K 2 over the bandwidth.
#include "core/cuda.cuh"
#include "ops/skinny_linear.cuh"

namespace bequest::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kWidth = kSkinnyWidth;
constexpr int64_t kWide = 8192;  // from this many outputs on, two rows per warp still fill the chip

__device__ __forceinline__ void unpack(const uint4& packed, float (&x)[kWidth]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(words[i] << 16);
    x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

// M rows of x, R rows of W per warp, U accesses of each in flight.
template <int M, int R, int U>
__global__ __launch_bounds__(kWarps* kWarp) void skinny_kernel(const SkinnyLinearParams p) {
  const int lane = threadIdx.x % kWarp;
  const int64_t first = (int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp) * R;
  const int steps = static_cast<int>(p.in_features / kSkinnyDepthUnit);
  const int64_t row_vectors = p.in_features / kWidth;
  const uint4* x = static_cast<const uint4*>(p.x) + lane;
  const uint4* w[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int64_t row = first + r < p.out_features ? first + r : p.out_features - 1;
    w[r] = static_cast<const uint4*>(p.weight) + row * row_vectors + lane;
  }
  uint4 ahead[U][R];
  const auto fetch = [&](int step) {
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int r = 0; r < R; ++r)
        if (step + u < steps) ahead[u][r] = load_once(w[r] + (step + u) * kWarp);
  };
  fetch(0);
  let_next_start();
  wait_for_previous();
  float sum[R][M] = {};
  for (int step = 0; step < steps; step += U) {
    uint4 now[U][R];
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int r = 0; r < R; ++r) now[u][r] = ahead[u][r];
    fetch(step + U);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (step + u >= steps) break;
      float weights[R][kWidth];
#pragma unroll
      for (int r = 0; r < R; ++r) unpack(now[u][r], weights[r]);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        float values[kWidth];
        unpack(x[m * row_vectors + (step + u) * kWarp], values);
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
          for (int i = 0; i < kWidth; ++i) sum[r][m] += weights[r][i] * values[i];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int m = 0; m < M; ++m) {
      float total = warp_sum(sum[r][m]);
      if (lane == 0 && first + r < p.out_features) {
        if (p.bias != nullptr) total += widen(static_cast<const BFloat16*>(p.bias)[first + r]);
        static_cast<BFloat16*>(p.out)[m * p.out_features + first + r] = narrow<BFloat16>(total);
      }
    }
}

template <int M>
void launch_rows(const SkinnyLinearParams& p, Stream stream) {
  const auto blocks = [&](int rows) {
    return static_cast<unsigned>(ceil_div(p.out_features, rows * kWarps));
  };
  if (p.out_features >= kWide) {
    const LaunchShape shape{.grid = blocks(2), .block = kWarps * kWarp, .overlaps_previous = true};
    return launch(skinny_kernel<M, 2, 2>, shape, stream, p);
  }
  const LaunchShape shape{.grid = blocks(1), .block = kWarps * kWarp, .overlaps_previous = true};
  launch(skinny_kernel<M, 1, 4>, shape, stream, p);
}

}  // namespace

void skinny_linear(const SkinnyLinearParams& p, Stream stream) {
  check(p.num_tokens >= 1 && p.num_tokens <= kMostSkinnyRows, "skinny_linear: 1 to 32 rows");
  check(p.in_features >= 1 && p.in_features % kSkinnyDepthUnit == 0,
        "skinny_linear: K is no multiple of 256");
  check(is_aligned(p.x, 16) && is_aligned(p.weight, 16),
        "skinny_linear: x and the weight are aligned to 16 bytes");
  switch (p.num_tokens) {
    case 1:
      return launch_rows<1>(p, stream);
    case 2:
      return launch_rows<2>(p, stream);
    case 3:
      return launch_rows<3>(p, stream);
    case 4:
      return launch_rows<4>(p, stream);
    default:
      return skinny_linear_mma(p, stream);
  }
}

}  // namespace bequest::cuda
