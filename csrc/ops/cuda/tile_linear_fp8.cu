#include "ops/cuda/tile_launch.cuh"

namespace bequest::cuda {

void tile_linear_fp8(const SkinnyLinearParams& p, const TilePlan& plan, Stream stream) {
  tiles::launch_format<TileFloat8, false, 8>(p, plan, stream);
}

}  // namespace bequest::cuda
