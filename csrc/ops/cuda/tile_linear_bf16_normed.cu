#include "ops/cuda/tile_launch.cuh"

namespace bequest::cuda {

void tile_linear_bf16_normed(const SkinnyLinearParams& p, const TilePlan& plan, Stream stream) {
  tiles::launch_format<TileBFloat16, true, 8, 1>(p, plan, stream);
}

}  // namespace bequest::cuda
