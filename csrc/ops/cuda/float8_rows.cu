// A block has a row and holds it in registers until the largest magnitude is known.
#include "device/launch.cuh"
#include "ops/cuda/float8_rows.cuh"

namespace bequest::cuda {
namespace {

constexpr int kWidth = kVectorWidth<BFloat16>;
constexpr int kMostThreads = 512;

template <int N>
__global__ void __launch_bounds__(kMostThreads) float8_rows_kernel(const Float8RowsParams p) {
  __shared__ float shared[kMostThreads / kWarp];
  let_next_start();
  const RowPlace<kWidth, N, false> place(p.width);
  const BFloat16* const from = static_cast<const BFloat16*>(p.x) + place.row() * p.width;
  wait_for_previous();
  Packed<BFloat16, kWidth> row[N];
  load_row(place, from, row);
  store_float8(place, p.to, p.width, row, shared);
}

template <int N>
void launch_vectors(const Float8RowsParams& p, Stream stream) {
  const int64_t threads = round_up(ceil_div(p.width / kWidth, N), kWarp);
  const LaunchShape shape{.grid = static_cast<unsigned>(p.num_tokens),
                          .block = static_cast<unsigned>(threads),
                          .overlaps_previous = true};
  launch(float8_rows_kernel<N>, shape, stream, p);
}

}  // namespace

void float8_rows(const Float8RowsParams& p, Stream stream) {
  check(p.num_tokens >= 1 && p.width >= kWidth && p.width % kWidth == 0, "float8_rows: sizes");
  check(is_aligned(p.x, 16) && is_aligned(p.to.codes, 8),
        "float8_rows: rows are aligned to 16 bytes, codes to 8");
  check(p.width <= 16 * kWidth * kMostThreads, "float8_rows: the rows are too long");
  if (p.width <= 4 * kWidth * kMostThreads) return launch_vectors<4>(p, stream);
  launch_vectors<16>(p, stream);
}

}  // namespace bequest::cuda
