// Which products are tiles, and how they are divided: by the sweeps of benchmarks/gpu_tiles.py.
#include "ops/cuda/tile_linear.h"

#include <algorithm>

#include "device/current_device.cuh"
#include "ops/cuda/tile_kernels.h"

namespace bequest::cuda {
namespace {

constexpr int64_t kSmallWeight = 8 << 20;  // elements
constexpr int64_t kFewRows = 32, kMoreRows = 64, kBlockRows = 128;
constexpr int64_t kManyOutputs = 40000,
                  kFewInputs = 2560;     // the begin and end of CTAs are much of the product
constexpr int64_t kFewestRows = 5;       // fewer are the chain's
constexpr int64_t kMostCodedRows = 256;  // of codes of 4 bits: more are faster as bfloat16
constexpr int64_t kGroupRows = 64, kMostSplits = 8;
constexpr int64_t kLeastDepth = 512;  // of k, of a CTA
constexpr int64_t kFewTilesDepth = 320, kLongDepth = 4096;
constexpr int64_t kMostRowSplits = 6;  // of bfloat16: larger clusters wait for neighbours that are free

// Of rows in e4m3, which are multiplied in waves.
constexpr int kWaveRows[] = {64, 96, 128, 144, 192, 224};
struct WaveSplits {
  int splits;
  int64_t parts_cost;  // to add the parts of a row of W
};
constexpr WaveSplits kWaveSplits[] = {{1, 0}, {2, 16}, {4, 20}};
constexpr int64_t kLineCost = 104;

// Costs are in rows of a line of 128 bytes: what a CTA reads of W, and of x with what a line takes beside it.
// A chip of which half is idle reads its lines in three quarters of the time.
TilePlan wave_plan(int64_t out_features, int64_t in_features) {
  const int64_t lines = in_features / 128, chip = multiprocessors();
  TilePlan best{};
  int64_t least = 0;
  for (const WaveSplits& way : kWaveSplits)
    for (const int rows : kWaveRows) {
      const int64_t room = way.splits < 4 ? chip : chip * 10 / 11;  // not all are in a cluster of four
      const int64_t blocks = ceil_div(out_features, rows) * way.splits, waves = ceil_div(blocks, room);
      const int64_t line = (rows + kLineCost) * (ceil_div(blocks, waves) + room);
      const int64_t cost = waves * ceil_div(lines, way.splits) * line / (2 * room) + rows * way.parts_cost;
      if (best.rows == 0 || cost < least) best = {rows, way.splits}, least = cost;
    }
  return best;
}

bool has_rows(int64_t num_tokens, int64_t elements, TileFormat format) {
  const bool small = elements <= kSmallWeight;
  switch (format) {
    case TileFormat::kInt4:
      return num_tokens >= 1 && num_tokens <= (small ? kBlockRows : kMostCodedRows);
    case TileFormat::kFloat8:
      return num_tokens >= kFewestRows && num_tokens <= kFewRows;
    case TileFormat::kFloat8Rows:
      return num_tokens > kFewRows && num_tokens <= kBlockRows;
    case TileFormat::kBFloat16:
      return num_tokens >= kFewestRows && num_tokens <= kMoreRows;
  }
  return false;
}

// What K is a multiple of.
int64_t depth_unit(TileFormat format) {
  return format == TileFormat::kInt4 || format == TileFormat::kFloat8Rows ? 128 : 64;
}

void check_sizes(const SkinnyLinearParams& p) {
  const int64_t unit = depth_unit(tile_format(p)), outputs = p.result == SkinnyResult::kGate ? 4 : 2;
  check(p.num_tokens >= 1, "tile_linear: no rows");
  check(p.in_features >= unit && p.in_features % unit == 0,
        "tile_linear: K is no multiple of 64, of x in e4m3 and of codes of 4 bits of 128");
  check(p.out_features >= outputs && p.out_features % outputs == 0, "tile_linear: an odd number of outputs");
}

void check_norms(const SkinnyLinearParams& p) {
  check(p.norm_weight == nullptr, "tile_linear: a norm that nothing has been left for");
  check(tile_format(p) == TileFormat::kBFloat16 || (p.squares == nullptr && p.ahead.gain == nullptr),
        "tile_linear: a norm beside codes");
  check(is_aligned(p.squares, 16) && (p.squares == nullptr || p.in_features % 32 == 0),
        "tile_linear: squares");
  check(in_range(p.tap) && !p.tap.store_output, "tile_linear: tap");
  check(p.tap.ring_rows == nullptr || (p.squares != nullptr && p.tapped != nullptr &&
                                       is_aligned(p.tapped, 16) && is_aligned(p.tap.ring, 16)),
        "tile_linear: a tap is the norm's");
  if (p.ahead.gain == nullptr) return;
  check(p.result == SkinnyResult::kAdd && p.squares == nullptr && p.out_features % 8 == 0,
        "tile_linear: what is ahead follows a sum");
  check(p.ahead.rows != nullptr && p.ahead.squares != nullptr && is_aligned(p.ahead.gain, 4) &&
            is_aligned(p.ahead.rows, 4) && is_aligned(p.ahead.squares, 4),
        "tile_linear: the norm ahead");
}

// Of weights in bfloat16: parts of k. groups: tiles of 64 rows of W
int64_t row_splits(int64_t groups, int64_t in_features, bool is_small) {
  const int64_t chip = multiprocessors(), each = std::max<int64_t>(chip / groups, 1);
  int64_t splits = std::min(chip * 17 / 10 / groups, in_features / kLeastDepth);
  // Where nearly all multiprocessors have one CTA, a second one on some of them would be waited for.
  if (each * groups * 20 >= chip * 19 && (is_small || in_features / each >= kLongDepth))
    splits = std::min(splits, each);
  // Where most would have none, pieces are shorter.
  if (splits * groups * 9 < chip * 4)
    splits = std::max(splits, std::min(chip * 3 / 4 / groups, in_features / kFewTilesDepth));
  return std::clamp<int64_t>(splits, 1, kMostRowSplits);
}

}  // namespace

bool is_tile_product(int64_t num_tokens, int64_t out_features, int64_t in_features, TileFormat format) {
  if (!has_rows(num_tokens, out_features * in_features, format)) return false;
  if (format == TileFormat::kBFloat16 && num_tokens > kFewRows / 2 && out_features > kManyOutputs &&
      in_features <= kFewInputs)
    return false;
  return out_features % 4 == 0 && in_features % depth_unit(format) == 0 && is_hopper();
}

// What CTAs read of x for each byte of W falls with the rows of W that they have; so do the CTAs that read.
// Two share a multiprocessor, but of codes with more than 32 tokens, whose rings have all of its memory; of
// bfloat16 the launch says which do.
TilePlan tile_plan(int64_t num_tokens, int64_t out_features, int64_t in_features, TileFormat format) {
  if (format == TileFormat::kFloat8Rows) return wave_plan(out_features, in_features);
  const int64_t chip = multiprocessors(), groups = ceil_div(out_features, kGroupRows);
  const bool is_alone = format == TileFormat::kInt4 && num_tokens > kFewRows;
  const bool is_wide = is_alone && num_tokens > kMoreRows;
  const int64_t blocks = is_alone ? chip / ceil_div(num_tokens, kBlockRows) : chip * 17 / 10;
  int64_t rows = groups > 2 * chip ? 2 : 1;
  if (is_wide) rows = groups > chip ? 4 : 1;
  if (format == TileFormat::kBFloat16) {
    const bool is_small = out_features * in_features <= kSmallWeight;
    return {static_cast<int>(rows * kGroupRows),
            static_cast<int>(row_splits(ceil_div(groups, rows), in_features, is_small))};
  }
  const int64_t least_depth = is_alone && !is_wide ? 2 * kLeastDepth : kLeastDepth;
  const int64_t most_splits = std::clamp<int64_t>(in_features / least_depth, 1, kMostSplits);
  const int64_t splits = std::min(blocks / ceil_div(groups, rows), most_splits);
  return {static_cast<int>(rows * kGroupRows), static_cast<int>(std::max<int64_t>(splits, 1))};
}

void tile_linear(const SkinnyLinearParams& p, const TilePlan& plan, Stream stream) {
  check_sizes(p);
  check(is_aligned(p.x, 16) && is_aligned(p.weight, 16) && is_aligned(p.out, 4) && is_aligned(p.bias, 4) &&
            is_aligned(p.scales, 8) && is_aligned(p.groups, 16),
        "tile_linear: x, weights and results must be aligned");
  check_norms(p);
  check(p.scales == nullptr || p.groups == nullptr, "tile_linear: codes are of one kind");
  check(plan.splits >= 1 && plan.splits <= kMostSplits, "tile_linear: 1 to 8 parts of k");
  check(is_hopper(), "tile_linear: for Hopper alone");
  check(p.x_scales == nullptr || p.scales != nullptr, "tile_linear: x in e4m3 is for weights in e4m3");
  const TileFormat format = tile_format(p);
  if (format == TileFormat::kFloat8Rows) return tile_linear_fp8_rows(p, plan, stream);
  check(plan.rows == kGroupRows || plan.rows == 2 * kGroupRows || plan.rows == 4 * kGroupRows,
        "tile_linear: 64, 128 or 256 rows of W");
  if (format == TileFormat::kInt4) return tile_linear_int4(p, plan, stream);
  if (format == TileFormat::kFloat8) return tile_linear_fp8(p, plan, stream);
  p.squares != nullptr ? tile_linear_bf16_normed(p, plan, stream) : tile_linear_bf16(p, plan, stream);
}

}  // namespace bequest::cuda
