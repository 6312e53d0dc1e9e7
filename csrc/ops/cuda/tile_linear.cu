#include "ops/cuda/tile_linear.h"

#include "device/current_device.cuh"
#include "ops/cuda/tile_kernels.h"

namespace bequest::cuda {
namespace {

void check_sizes(const SkinnyLinearParams& p) {
  const int64_t unit = p.groups != nullptr ? 2 * kTileDepthUnit : kTileDepthUnit;
  const int64_t outputs = p.result == SkinnyResult::kGate ? p.out_features / 2 : p.out_features;
  check(p.num_tokens >= 1 && p.num_tokens <= kMostTileTokens, "tile_linear: 1 to 128 rows");
  check(p.in_features >= unit && p.in_features % unit == 0,
        "tile_linear: K is no multiple of 64, of codes of 4 bits 128");
  check(outputs >= 2 && outputs % 2 == 0 && p.out_features % 2 == 0, "tile_linear: an odd number of outputs");
}

}  // namespace

void tile_linear(const SkinnyLinearParams& p, const TilePlan& plan, Stream stream) {
  check_sizes(p);
  check(is_aligned(p.x, 16) && is_aligned(p.weight, 16) && is_aligned(p.norm_weight, 16) &&
            is_aligned(p.out, 4) && is_aligned(p.bias, 4) && is_aligned(p.scales, 8) &&
            is_aligned(p.groups, 16),
        "tile_linear: x, weights and results must be aligned");
  check(p.scales == nullptr || p.groups == nullptr, "tile_linear: codes are of one kind");
  check(in_range(p.tap) && !p.tap.store_output, "tile_linear: tap");
  check(p.tap.ring_rows == nullptr || (p.norm_weight != nullptr && is_aligned(p.tap.ring, 16)),
        "tile_linear: a tap is the norm's");
  check(plan.row_groups == 1 || plan.row_groups == 2 || plan.row_groups == 4,
        "tile_linear: 1, 2 or 4 groups of rows");
  check(plan.splits >= 1 && plan.splits <= 8, "tile_linear: 1 to 8 parts of k");
  check(is_hopper(), "tile_linear: for Hopper alone");
  const bool normed = p.norm_weight != nullptr;
  if (p.groups != nullptr)
    return normed ? tile_linear_int4_normed(p, plan, stream) : tile_linear_int4(p, plan, stream);
  if (p.scales != nullptr)
    return normed ? tile_linear_fp8_normed(p, plan, stream) : tile_linear_fp8(p, plan, stream);
  normed ? tile_linear_bf16_normed(p, plan, stream) : tile_linear_bf16(p, plan, stream);
}

}  // namespace bequest::cuda
