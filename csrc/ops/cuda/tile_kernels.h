// The kernels of tile_linear.h, in files of their own, which compile side by side.
#pragma once

#include "ops/cuda/tile_linear.h"

namespace bequest::cuda {

void tile_linear_bf16(const SkinnyLinearParams& p, const TilePlan& plan, Stream stream);
void tile_linear_bf16_normed(const SkinnyLinearParams& p, const TilePlan& plan, Stream stream);
void tile_linear_fp8(const SkinnyLinearParams& p, const TilePlan& plan, Stream stream);
void tile_linear_fp8_rows(const SkinnyLinearParams& p, const TilePlan& plan, Stream stream);
void tile_linear_int4(const SkinnyLinearParams& p, const TilePlan& plan, Stream stream);

}  // namespace bequest::cuda
