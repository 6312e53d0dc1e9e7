// From a plan to one of the kernels of a format.
#pragma once

#include "ops/cuda/tile_kernels.h"
#include "ops/cuda/tile_linear.cuh"

namespace bequest::cuda::tiles {

template <class Format, int kTokenTiles, bool kNorm>
void launch_rows(const SkinnyLinearParams& p, const TilePlan& plan, Stream stream) {
  if (plan.rows == kGroupRows)
    return launch_kernel<Sizes<Format, kTokenTiles, 1>, kNorm>(p, plan.splits, stream);
  if (plan.rows == 2 * kGroupRows)
    return launch_kernel<Sizes<Format, kTokenTiles, 2>, kNorm>(p, plan.splits, stream);
  launch_kernel<Sizes<Format, kTokenTiles, 4>, kNorm>(p, plan.splits, stream);
}

// kMostTiles, kFewestTiles: of 8 tokens, that the format's widest and narrowest kernels have; more tokens are
// blocks of the most.
template <class Format, bool kNorm, int kMostTiles, int kFewestTiles = 2>
void launch_format(const SkinnyLinearParams& p, const TilePlan& plan, Stream stream) {
  if constexpr (kFewestTiles == 1)
    if (p.num_tokens <= 8) return launch_rows<Format, 1, kNorm>(p, plan, stream);
  if (p.num_tokens <= 16) return launch_rows<Format, 2, kNorm>(p, plan, stream);
  if (kMostTiles == 4 || p.num_tokens <= 32) return launch_rows<Format, 4, kNorm>(p, plan, stream);
  if constexpr (kMostTiles > 4)
    if (kMostTiles == 8 || p.num_tokens <= 64) return launch_rows<Format, 8, kNorm>(p, plan, stream);
  if constexpr (kMostTiles > 8) launch_rows<Format, 16, kNorm>(p, plan, stream);
}

}  // namespace bequest::cuda::tiles
