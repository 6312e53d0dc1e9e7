#include "ops/cpu/gather.h"

#include <string>

#include "core/half.h"
#include "core/threads.h"
#include "ops/cpu/quantised.h"

namespace bequest {
namespace {

template <class T>
void gather_plain(const GatherParams& p, int64_t id, float* out) {
  const T* column =
      static_cast<const T*>(p.weight) + id / kPanelWidth * p.in_features * kPanelWidth + id % kPanelWidth;
  for (int64_t k = 0; k < p.in_features; ++k) out[k] = to_float(column[k * kPanelWidth]);
}

void gather_tiled(const GatherParams& p, int64_t id, float* out) {
  const auto* column = static_cast<const BFloat16*>(p.weight) + tiled_column(id, p.in_features);
  // A row is a pair in each of many cache lines: ask for those of a tile while others are on their way.
  constexpr int64_t kTilesAhead = 4;
  const auto fetch = [&](int64_t k) {
    for (int64_t pair = 0; pair < kTileDepth; pair += 2)
      __builtin_prefetch(column + tiled_depth(k) + pair / 2 * kTileDepth);
  };
  for (int64_t k = 0; k < kTilesAhead * kTileDepth; k += kTileDepth) fetch(k);
  for (int64_t tile = 0; tile < p.in_features; tile += kTileDepth) {
    fetch(tile + kTilesAhead * kTileDepth);
    const int64_t end = tile + kTileDepth < p.in_features ? tile + kTileDepth : p.in_features;
    for (int64_t k = tile; k < end; ++k) out[k] = to_float(column[tiled_depth(k)]);
  }
}

template <int Bits>
void gather_quantised(const GatherParams& p, int64_t id, float* out) {
  const int64_t groups = p.in_features / kGroup, column = id % kPanelWidth;
  const auto* panel = static_cast<const QuantisedGroup<Bits>*>(p.weight) + id / kPanelWidth * groups;
  for (int64_t g = 0; g < groups; ++g) {
    const float scale = half_to_float(panel[g].scales[column]);
    const float offset = half_to_float(panel[g].offsets[column]);
    for (int64_t k = 0; k < kGroup; ++k)
      out[g * kGroup + k] = scale * static_cast<float>(panel[g].code(k, column)) + offset;
  }
}

// A group of a super block of a column.
template <int Bits>
void gather_group(const SuperBlock<Bits>& block, int group, int64_t column, float* out) {
  const float scale = half_to_float(block.scales[column]);
  for (int k = 0; k < kGroup; ++k) {
    uint32_t code = block.words[group][k / 8][column] >> 4 * (k % 8) & 15u;
    if constexpr (Bits > 4) {
      const HighPlace place = high_place(Bits - 4, k);
      code |= (block.high[group][place.word][column] >> place.shift & ((1u << (Bits - 4)) - 1)) << 4;
    }
    if constexpr (Bits == 6) {
      const float own = scale * static_cast<float>(block.group_scales[2 * group + k / 16][column]);
      out[k] = own * static_cast<float>(static_cast<int>(code) - 32);
    } else {
      const float own = scale * static_cast<float>(block.group_scales[group][column]);
      const float least =
          half_to_float(block.offsets[column]) * static_cast<float>(block.group_offsets[group][column]);
      out[k] = own * static_cast<float>(code) - least;
    }
  }
}

template <int Bits>
void gather_super(const GatherParams& p, int64_t id, float* out) {
  const int64_t blocks = p.in_features / (kGroup * kSuperGroups), column = id % kPanelWidth;
  const auto* panel = static_cast<const SuperBlock<Bits>*>(p.weight) + id / kPanelWidth * blocks;
  for (int64_t block = 0; block < blocks; ++block)
    for (int group = 0; group < kSuperGroups; ++group, out += kGroup)
      gather_group(panel[block], group, column, out);
}

void gather_row(const GatherParams& p, int64_t id, float* out) {
  switch (exact_of(p.format)) {
    case WeightFormat::kF32:
      return gather_plain<float>(p, id, out);
    case WeightFormat::kBF16:
      return gather_plain<BFloat16>(p, id, out);
    case WeightFormat::kQ4:
      return gather_quantised<4>(p, id, out);
    case WeightFormat::kQ8:
      return gather_quantised<8>(p, id, out);
    case WeightFormat::kK4:
      return gather_super<4>(p, id, out);
    case WeightFormat::kK5:
      return gather_super<5>(p, id, out);
    case WeightFormat::kK6:
      return gather_super<6>(p, id, out);
    case WeightFormat::kTiles:
      return gather_tiled(p, id, out);
    case WeightFormat::kFast:
      break;
  }
  fail("gather_rows: unknown format");
}

}  // namespace

void gather_rows(const GatherParams& p) {
  for (int64_t t = 0; t < p.num_tokens; ++t) {
    if (p.ids[t] < 0 || p.ids[t] >= p.out_features) [[unlikely]]
      fail("gather_rows: id " + std::to_string(p.ids[t]) + " is outside the " +
           std::to_string(p.out_features) + " rows");
  }
  parallel_for(p.num_tokens, 4, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) gather_row(p, p.ids[t], p.out + t * p.in_features);
  });
}

}  // namespace bequest
