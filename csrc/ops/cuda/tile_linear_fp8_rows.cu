#include "ops/cuda/tile_launch.cuh"

namespace bequest::cuda {

void tile_linear_fp8_rows(const SkinnyLinearParams& p, const TilePlan& plan, Stream stream) {
  tiles::launch_format<TileFloat8Rows, false, 16>(p, plan, stream);
}

}  // namespace bequest::cuda
