#include "ops/cuda/tile_launch.cuh"

namespace bequest::cuda {

void tile_linear_int4(const SkinnyLinearParams& p, const TilePlan& plan, Stream stream) {
  tiles::launch_format<TileInt4, false, 16>(p, plan, stream);
}

}  // namespace bequest::cuda
