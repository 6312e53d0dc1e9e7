#include "ops/cuda/tile_kernels.h"
#include "ops/cuda/tile_wave.cuh"

namespace bequest::cuda {
namespace {

// kLines, kMoreLines: of a stage, of up to 64 rows and of more. Each stage costs the warps that multiply some
// hundred clocks, so small ones have two.
template <int kRows, int kLines, int kMoreLines>
void launch_rows(const SkinnyLinearParams& p, int splits, Stream stream) {
  if (p.num_tokens <= 64) return tiles::launch_wave<tiles::WaveSizes<kRows, kLines, 64>>(p, splits, stream);
  tiles::launch_wave<tiles::WaveSizes<kRows, kMoreLines, 128>>(p, splits, stream);
}

}  // namespace

void tile_linear_fp8_rows(const SkinnyLinearParams& p, const TilePlan& plan, Stream stream) {
  check(plan.splits <= tiles::kMostWaveSplits, "tile_linear: of rows in e4m3, 1 to 4 parts of k");
  check(is_aligned(p.out, 8), "tile_linear: of rows in e4m3, results must be aligned to 8 bytes");
  switch (plan.rows) {
    case 64:
      return launch_rows<64, 2, 2>(p, plan.splits, stream);
    case 96:
      return launch_rows<96, 2, 1>(p, plan.splits, stream);
    case 128:
      return launch_rows<128, 2, 1>(p, plan.splits, stream);
    case 144:
      return launch_rows<144, 2, 1>(p, plan.splits, stream);
    case 192:
      return launch_rows<192, 1, 1>(p, plan.splits, stream);
    case 224:
      return launch_rows<224, 1, 1>(p, plan.splits, stream);
    default:
      fail("tile_linear: of rows in e4m3, 64, 96, 128, 144, 192 or 224 rows of W");
  }
}

}  // namespace bequest::cuda
