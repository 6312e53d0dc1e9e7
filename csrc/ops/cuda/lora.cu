// Two launches: x times A, [rows, R], then that times B, added to the rows of the product. Both multiply
// tiles of up to 16 rows of one slot on tensor cores; of one row they read the same bytes, and those are what
// takes the time.
//
// The order of the depth is free as long as both operands have the same. So lanes load 16 (A) or 8 (B)
// consecutive bytes, which mma.sync would have in several places.
#include "core/dtype.h"
#include "device/launch.cuh"
#include "device/reductions.cuh"
#include "device/tensor_core.cuh"
#include "device/vectors.cuh"
#include "ops/cuda/lora.h"

namespace bequest::cuda {
namespace {

constexpr int kShrinkWarps = 8;
constexpr int kDepth = 32;  // that a warp multiplies at a time: 8 elements to a lane
constexpr int kExpandWarps = 4;
constexpr int kWarpColumns = 32;
constexpr int kColumns = 8;  // of one mma.sync

struct Tile {
  int first, count, slot;
};

__device__ __forceinline__ Tile tile_of(const LoraTiles& tiles, unsigned index) {
  const int32_t* const tile = tiles.tiles + int64_t{index} * 3;
  return {tile[0], tile[1], tile[2]};
}

__device__ __forceinline__ uint4 load16(const BFloat16* p) { return *reinterpret_cast<const uint4*>(p); }

// Two steps of 16 of the depth: rows g and g + 8 of the left side, columns g of the right side.
__device__ __forceinline__ void multiply_depth(float (&sum)[4], const uint4& low, const uint4& high,
                                               const uint4& right) {
  multiply_accumulate(sum, {low.x, high.x, low.y, high.y}, right.x, right.y);
  multiply_accumulate(sum, {low.z, high.z, low.w, high.w}, right.z, right.w);
}

// shrunk[rows of the tile, 16 ranks of a part]: grid (P R / 16, tiles). Warps share the depth.
__global__ void __launch_bounds__(kShrinkWarps* kWarp) shrink_kernel(const LoraParams p) {
  let_next_start();
  wait_for_previous();
  const LoraSite& site = p.site;
  const Tile tile = tile_of(p.tiles, blockIdx.y);
  const int ranks_of_part = static_cast<int>(site.most_rank);
  const int part = static_cast<int>(blockIdx.x) * kLoraRanks / ranks_of_part;
  const int first_rank = static_cast<int>(blockIdx.x) * kLoraRanks - part * ranks_of_part;
  const int64_t entry = int64_t{tile.slot} * site.num_parts + part;
  if (tile.count == 0 || first_rank >= site.ranks[entry]) return;

  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int group = lane / 4, place = lane % 4 * 8;
  const int64_t depth = site.in_features;
  const auto row = [&](int i) -> const BFloat16* {
    return static_cast<const BFloat16*>(p.x) + p.tiles.rows[tile.first + i] * depth + place;
  };
  const bool has_low = group < tile.count, has_high = group + 8 < tile.count;
  const BFloat16* const low = has_low ? row(group) : nullptr;
  const BFloat16* const high = has_high ? row(group + 8) : nullptr;
  const BFloat16* const a =
      static_cast<const BFloat16*>(site.a) + ((entry * site.most_rank) + first_rank + group) * depth + place;

  float sums[2][4] = {};
  const uint4 zero{};
#pragma unroll 4
  for (int64_t k = int64_t{warp} * kDepth; k < depth; k += kShrinkWarps * kDepth) {
    const uint4 x_low = has_low ? load16(low + k) : zero;
    const uint4 x_high = has_high ? load16(high + k) : zero;
    multiply_depth(sums[0], x_low, x_high, load16(a + k));
    multiply_depth(sums[1], x_low, x_high, load16(a + 8 * depth + k));
  }

  __shared__ float parts[kShrinkWarps][kLoraRows][kLoraRanks];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      parts[warp][group + i / 2 * 8][half * 8 + lane % 4 * 2 + i % 2] = sums[half][i];
  }
  __syncthreads();
  const int i = threadIdx.x / kLoraRanks, rank = threadIdx.x % kLoraRanks;
  if (i >= tile.count) return;
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kShrinkWarps; ++w) sum += parts[w][i][rank];
  const int64_t width = site.num_parts * site.most_rank;
  p.shrunk[(tile.first + i) * width + part * site.most_rank + first_rank + rank] = sum * site.scales[entry];
}

static_assert(kShrinkWarps * kWarp == kLoraRows * kLoraRanks, "a thread for each sum");

__device__ __forceinline__ uint32_t pack(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Rows of the tile, 128 columns of y: grid (N / 128, tiles).
__global__ void __launch_bounds__(kExpandWarps* kWarp) expand_kernel(const LoraParams p) {
  let_next_start();
  wait_for_previous();
  const LoraSite& site = p.site;
  const Tile tile = tile_of(p.tiles, blockIdx.y);
  if (tile.count == 0) return;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int group = lane / 4, place = lane % 4;
  const int64_t width = site.num_parts * site.most_rank, columns = site.out_features;
  const bool has_low = group < tile.count, has_high = group + 8 < tile.count;
  const float* const low = p.shrunk + (tile.first + (has_low ? group : 0)) * width + place * 4;
  const float* const high = p.shrunk + (tile.first + (has_high ? group + 8 : 0)) * width + place * 4;
  const BFloat16* const slot =
      static_cast<const BFloat16*>(site.b) + int64_t{tile.slot} * site.most_rank * columns + place * 4;

  const int64_t begin = (int64_t{blockIdx.x} * kExpandWarps + warp) * kWarpColumns;
  int part = 0;
#pragma unroll 4
  for (int64_t n = begin; n < min(begin + kWarpColumns, columns); n += kColumns) {
    while (part + 1 < site.num_parts && n >= site.ends[part]) ++part;
    const int rank = n < site.ends[part] ? site.ranks[tile.slot * site.num_parts + part] : 0;
    float sum[4] = {};
    for (int r = 0; r < rank; r += kLoraRanks) {
      const float4 none{}, at_low = *reinterpret_cast<const float4*>(low + part * site.most_rank + r);
      const float4 at_high =
          has_high ? *reinterpret_cast<const float4*>(high + part * site.most_rank + r) : none;
      const uint2 b =
          *reinterpret_cast<const uint2*>(slot + (r / kLoraRanks * columns + n + group) * kLoraRanks);
      const uint32_t left[4] = {pack(at_low.x, at_low.y), pack(at_high.x, at_high.y),
                                pack(at_low.z, at_low.w), pack(at_high.z, at_high.w)};
      multiply_accumulate(sum, left, b.x, b.y);
    }
    if (rank == 0) continue;
    const auto add = [&](int i, float first, float second) {
      BFloat16* const y =
          static_cast<BFloat16*>(p.y) + p.tiles.rows[tile.first + i] * columns + n + place * 2;
      float values[2];
      load_vector<BFloat16, 2>(y, values);
      values[0] += first;
      values[1] += second;
      store_vector<BFloat16, 2>(y, values);
    };
    if (has_low) add(group, sum[0], sum[1]);
    if (has_high) add(group + 8, sum[2], sum[3]);
  }
}

}  // namespace

void add_lora(const LoraParams& p, Stream stream) {
  const LoraSite& site = p.site;
  check(site.num_parts >= 1 && site.num_parts <= kMostLoraParts, "add_lora: parts");
  check(site.most_rank >= 1 && site.most_rank % kLoraRanks == 0,
        "add_lora: the rank must be a multiple of 16");
  check(site.in_features % kDepth == 0 && site.out_features % kColumns == 0, "add_lora: odd sizes");
  check(is_aligned(p.x, 16) && is_aligned(site.a, 16) && is_aligned(site.b, 16) && is_aligned(p.y, 4) &&
            is_aligned(p.shrunk, 16),
        "add_lora: rows must be aligned");
  const auto tiles = static_cast<unsigned>(p.tiles.num_tiles);
  const auto chunks = static_cast<unsigned>(site.num_parts * site.most_rank / kLoraRanks);
  launch(shrink_kernel, {.grid = {chunks, tiles}, .block = kShrinkWarps * kWarp, .overlaps_previous = true},
         stream, p);
  const auto blocks = static_cast<unsigned>(ceil_div(site.out_features, kExpandWarps * kWarpColumns));
  launch(expand_kernel, {.grid = {blocks, tiles}, .block = kExpandWarps * kWarp, .overlaps_previous = true},
         stream, p);
}

}  // namespace bequest::cuda
