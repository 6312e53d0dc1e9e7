#include "ops/cuda/tile_launch.cuh"

namespace bequest::cuda {

void tile_linear_bf16(const SkinnyLinearParams& p, const TilePlan& plan, Stream stream) {
  tiles::launch_format<TileBFloat16, false, 8, 1>(p, plan, stream);
}

}  // namespace bequest::cuda
