// Two launches: x times A, then that times B, added to the rows of the product. Both multiply tiles of up to
// 16 rows of one slot on tensor cores; of one row they read the same bytes, and those are what takes the
// time. So all of a thread's part of A or B is asked for at once, before the predecessor has ended, and the
// depth of A is cut into pieces that fill the chip; B's kernel adds what these have left, in their order.
//
// Who has which slot, and what slots hold, was there before the step's first kernel began.
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

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kDepth = 32;  // that a warp multiplies at a time: 8 elements to a lane
constexpr int kSteps = kLoraPiece / (kWarps * kDepth);
constexpr int kColumns = 8;  // of one mma.sync
constexpr int kGroups = 8;   // of columns that a warp has
constexpr int kWarpColumns = kGroups * kColumns;

struct Tile {
  int first, count, slot;
};

__device__ __forceinline__ Tile tile_of(const LoraTiles& tiles, unsigned index) {
  const int32_t* const tile = tiles.tiles + int64_t{index} * 3;
  return {__ldcg(tile), __ldcg(tile + 1), __ldcg(tile + 2)};
}

// A matrix of an adapter: read once by this step, or by few.
__device__ __forceinline__ uint4 load16(const BFloat16* p) {
  return __ldcg(reinterpret_cast<const uint4*>(p));
}

// --- A
// -------------------------------------------------------------------------------------------------------------

// Two steps of 16 of the depth: rows g and g + 8 of the left side, columns g of the right side.
__device__ __forceinline__ void multiply_depth(float (&sum)[4], const uint4& low, const uint4& high,
                                               const uint4& right) {
  multiply_accumulate(sum, {low.x, high.x, low.y, high.y}, right.x, right.y);
  multiply_accumulate(sum, {low.z, high.z, low.w, high.w}, right.z, right.w);
}

// A lane's part of 16 ranks of A, or of up to 16 rows of x: two vectors for each step.
struct Vectors {
  uint4 low[kSteps], high[kSteps];

  // steps: how many there are before the end of the depth
  __device__ __forceinline__ void load(const BFloat16* low_at, const BFloat16* high_at, int steps) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const bool exists = s < steps;
      low[s] = exists && low_at != nullptr ? load16(low_at + s * (kWarps * kDepth)) : uint4{};
      high[s] = exists && high_at != nullptr ? load16(high_at + s * (kWarps * kDepth)) : uint4{};
    }
  }
};

// A thread has the sum of one row and one rank: of all warps, in their order.
__device__ __forceinline__ float sum_of_warps(const float (&sums)[2][4], int warp, int lane) {
  __shared__ float parts[kWarps][kLoraRows][kLoraRanks];
  __syncthreads();  // the last ones have been read
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      parts[warp][lane / 4 + i / 2 * 8][half * 8 + lane % 4 * 2 + i % 2] = sums[half][i];
  __syncthreads();
  const int i = threadIdx.x / kLoraRanks, rank = threadIdx.x % kLoraRanks;
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += parts[w][i][rank];
  return sum;
}
static_assert(kThreads == kLoraRows * kLoraRanks, "a thread for each sum");

// A piece of the depth of one part, for the rows of a tile: grid (P pieces, tiles).
__global__ __launch_bounds__(kThreads, 2) void shrink_kernel(const LoraShrinkParams p) {
  let_next_start();
  const LoraSite& site = p.site;
  const Tile tile = tile_of(p.tiles, blockIdx.y);
  const int pieces = static_cast<int>(lora_pieces(site.in_features));
  const int part = static_cast<int>(blockIdx.x) / pieces, piece = static_cast<int>(blockIdx.x) % pieces;
  const int64_t entry = int64_t{tile.slot} * site.num_parts + part;
  const int rank = tile.count == 0 ? 0 : __ldcg(site.ranks + entry);
  if (rank == 0) return wait_for_previous();  // or who waits for this kernel would not wait for that one

  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int group = lane / 4;
  const int64_t depth = site.in_features;
  const int begin = piece * kLoraPiece + warp * kDepth;
  const int steps = (static_cast<int>(depth) - begin + kWarps * kDepth - 1) / (kWarps * kDepth);
  const int64_t place = begin + lane % 4 * 8;
  const BFloat16* a = static_cast<const BFloat16*>(site.a) + (entry * site.most_rank + group) * depth + place;
  Vectors weights, rows;
  weights.load(a, a + 8 * depth, steps);
  const float scale = __ldcg(site.scales + entry);
  const auto row_at = [&](int i) -> const BFloat16* {
    if (i >= tile.count) return nullptr;
    return static_cast<const BFloat16*>(p.x) + __ldcg(p.tiles.rows + tile.first + i) * depth + place;
  };
  const BFloat16* const low = row_at(group);
  const BFloat16* const high = row_at(group + 8);
  wait_for_previous();
  rows.load(low, high, steps);

  const int64_t width = site.num_parts * site.most_rank;
  const int i = threadIdx.x / kLoraRanks;
  float* const to = p.shrunk + (int64_t{piece} * p.num_rows + tile.first + i) * width +
                    part * site.most_rank + threadIdx.x % kLoraRanks;
#pragma unroll 1
  for (int first = 0; first < rank; first += kLoraRanks) {
    float sums[2][4] = {};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      multiply_depth(sums[0], rows.low[s], rows.high[s], weights.low[s]);
      multiply_depth(sums[1], rows.low[s], rows.high[s], weights.high[s]);
    }
    a += kLoraRanks * depth;
    if (first + kLoraRanks < rank) weights.load(a, a + 8 * depth, steps);
    const float sum = sum_of_warps(sums, warp, lane);
    if (i < tile.count) to[first] = sum * scale;
  }
}

// --- B
// -------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ int part_of(const LoraSite& site, int64_t column) {
  int part = 0;
#pragma unroll
  for (int i = 0; i + 1 < kMostLoraParts; ++i)
    if (i + 1 < site.num_parts && column >= site.ends[i]) part = i + 1;
  return part;
}

// What all pieces of the depth have left for the rows of a tile, to shared memory [16, P R]: of the parts
// from `first_part` to `last_part`. By the whole block.
__device__ __forceinline__ void gather_shrunk(const LoraExpandParams& p, const Tile& tile, int first_part,
                                              int last_part, BFloat16* shrunk) {
  const LoraSite& site = p.site;
  const int most_rank = static_cast<int>(site.most_rank),
            pieces = static_cast<int>(lora_pieces(site.in_features));
  const int64_t width = site.num_parts * most_rank, stride = p.num_rows * width;
#pragma unroll 1
  for (int part = first_part; part <= last_part; ++part) {
    const int rank = __ldcg(site.ranks + tile.slot * site.num_parts + part);
#pragma unroll 1
    for (int i = threadIdx.x; i < kLoraRows * rank; i += kThreads) {
      const int row = i / rank, at = part * most_rank + i % rank;
      float sum = 0;
      if (row < tile.count) {
        const float* from = p.shrunk + (tile.first + row) * width + at;
#pragma unroll 4
        for (int piece = 0; piece < pieces; ++piece) sum += __ldcg(from + piece * stride);
      }
      shrunk[row * width + at] = narrow<BFloat16>(sum);
    }
  }
  __syncthreads();
}

// A lane's two columns of one row of y, in groups.
class Columns {
 public:
  // Of the tile's row `i`, if it has so many.
  __device__ __forceinline__ Columns(const LoraExpandParams& p, const Tile& tile, int i, int64_t column) {
    if (i >= tile.count) return;
    const int64_t row = __ldcg(p.tiles.rows + tile.first + i);
    at_ = reinterpret_cast<uint32_t*>(static_cast<BFloat16*>(p.y) + row * p.site.out_features + column);
  }

  __device__ __forceinline__ void load(int64_t left) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
      if (at_ != nullptr && g * kColumns < left) of_[g] = __ldcg(at_ + g * (kColumns / 2));
  }

  __device__ __forceinline__ void add(int g, float first, float second) const {
    if (at_ == nullptr) return;
    const __nv_bfloat162 pair = __floats2bfloat162_rn(__uint_as_float(of_[g] << 16) + first,
                                                      __uint_as_float(of_[g] & 0xffff0000u) + second);
    at_[g * (kColumns / 2)] = *reinterpret_cast<const uint32_t*>(&pair);
  }

 private:
  uint32_t* at_ = nullptr;
  uint32_t of_[kGroups] = {};
};

// Rows of the tile, 512 columns of y: grid (N / 512, tiles).
__global__ __launch_bounds__(kThreads, 3) void expand_kernel(const LoraExpandParams p) {
  extern __shared__ __align__(16) uint8_t shared[];
  auto* const shrunk = reinterpret_cast<BFloat16*>(shared);
  let_next_start();
  const LoraSite& site = p.site;
  const Tile tile = tile_of(p.tiles, blockIdx.y);
  if (tile.count == 0) return wait_for_previous();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int group = lane / 4, place = lane % 4;
  const int64_t width = site.num_parts * site.most_rank, columns = site.out_features;
  const int64_t block_begin = int64_t{blockIdx.x} * (kWarps * kWarpColumns);
  const int64_t begin = block_begin + warp * kWarpColumns, left = columns - begin;
  const BFloat16* const b =
      static_cast<const BFloat16*>(site.b) +
      (int64_t{tile.slot} * site.most_rank / kLoraRanks * columns + begin + group) * kLoraRanks + place * 4;
  const auto load_b = [&](int g, int chunk) {
    return __ldcg(reinterpret_cast<const uint2*>(b + (chunk * columns + g * kColumns) * kLoraRanks));
  };
  const int32_t* const ranks = site.ranks + tile.slot * site.num_parts;
  uint2 first[kGroups];
  int parts[kGroups], rank_of[kGroups];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    parts[g] = part_of(site, begin + g * kColumns);
    rank_of[g] = g * kColumns < left ? __ldcg(ranks + parts[g]) : 0;
  }
#pragma unroll
  for (int g = 0; g < kGroups; ++g)
    if (rank_of[g] > 0) first[g] = load_b(g, 0);

  Columns low(p, tile, group, begin + place * 2), high(p, tile, group + 8, begin + place * 2);
  wait_for_previous();
  low.load(left);
  high.load(left);
  const int64_t block_last = min(block_begin + kWarps * kWarpColumns, columns) - 1;
  gather_shrunk(p, tile, part_of(site, block_begin), part_of(site, block_last), shrunk);

#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    if (rank_of[g] == 0) continue;
    const BFloat16* const x = shrunk + group * width + parts[g] * site.most_rank + place * 4;
    float sum[4] = {};
    uint2 of_chunk = first[g];
#pragma unroll 1
    for (int rank = 0;;) {
      const uint2 x_low = *reinterpret_cast<const uint2*>(x + rank);
      const uint2 x_high = *reinterpret_cast<const uint2*>(x + 8 * width + rank);
      multiply_accumulate(sum, {x_low.x, x_high.x, x_low.y, x_high.y}, of_chunk.x, of_chunk.y);
      rank += kLoraRanks;
      if (rank >= rank_of[g]) break;
      of_chunk = load_b(g, rank / kLoraRanks);
    }
    low.add(g, sum[0], sum[1]);
    high.add(g, sum[2], sum[3]);
  }
}

void check_site(const LoraSite& site) {
  check(site.num_parts >= 1 && site.num_parts <= kMostLoraParts, "lora: parts");
  check(site.most_rank >= 1 && site.most_rank % kLoraRanks == 0, "lora: the rank must be a multiple of 16");
  check(site.in_features % kDepth == 0 && site.out_features % kColumns == 0, "lora: odd sizes");
  check(is_aligned(site.a, 16) && is_aligned(site.b, 16), "lora: matrices must be aligned");
}

}  // namespace

void lora_shrink(const LoraShrinkParams& p, Stream stream) {
  check_site(p.site);
  check(is_aligned(p.x, 16), "lora_shrink: rows must be aligned");
  const auto tiles = static_cast<unsigned>(p.tiles.num_tiles);
  const auto blocks = static_cast<unsigned>(p.site.num_parts * lora_pieces(p.site.in_features));
  launch(shrink_kernel, {.grid = {blocks, tiles}, .block = kThreads, .overlaps_previous = true}, stream, p);
}

void lora_expand(const LoraExpandParams& p, Stream stream) {
  check_site(p.site);
  check(is_aligned(p.y, 4), "lora_expand: rows must be aligned");
  const auto tiles = static_cast<unsigned>(p.tiles.num_tiles);
  const auto blocks = static_cast<unsigned>(ceil_div(p.site.out_features, kWarps * kWarpColumns));
  launch(expand_kernel,
         {.grid = {blocks, tiles},
          .block = kThreads,
          .shared_bytes = static_cast<size_t>(kLoraRows * p.site.num_parts * p.site.most_rank * 2),
          .overlaps_previous = true},
         stream, p);
}

}  // namespace bequest::cuda
