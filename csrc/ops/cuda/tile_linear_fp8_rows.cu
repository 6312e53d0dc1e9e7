#include "ops/cuda/tile_kernels.h"
#include "ops/cuda/tile_wave.cuh"

namespace bequest::cuda {

// Small stages of two lines: each stage costs the warps that multiply some hundred clocks.
void tile_linear_fp8_rows(const SkinnyLinearParams& p, const TilePlan& plan, Stream stream) {
  check(plan.splits <= tiles::kMostWaveSplits, "tile_linear: of rows in e4m3, 1 to 4 parts of k");
  check(is_aligned(p.out, 8), "tile_linear: of rows in e4m3, results must be aligned to 8 bytes");
  switch (plan.rows) {
    case 64:
      return tiles::launch_wave<tiles::WaveSizes<64, 2>>(p, plan.splits, stream);
    case 96:
      return tiles::launch_wave<tiles::WaveSizes<96, 2>>(p, plan.splits, stream);
    case 128:
      return tiles::launch_wave<tiles::WaveSizes<128, 2>>(p, plan.splits, stream);
    case 144:
      return tiles::launch_wave<tiles::WaveSizes<144, 2>>(p, plan.splits, stream);
    case 192:
      return tiles::launch_wave<tiles::WaveSizes<192, 1>>(p, plan.splits, stream);
    case 224:
      return tiles::launch_wave<tiles::WaveSizes<224, 1>>(p, plan.splits, stream);
    default:
      fail("tile_linear: of rows in e4m3, 64, 96, 128, 144, 192 or 224 rows of W");
  }
}

}  // namespace bequest::cuda
