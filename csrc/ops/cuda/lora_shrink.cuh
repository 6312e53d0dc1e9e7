// x times A. A unit is a piece of the depth of one part, for the rows of a tile; 16 ranks of half of it are a
// buffer of the ring. Warps multiply a part of the piece each, on tensor cores, and add what they have in
// their order. Whoever multiplies by B adds the pieces.
//
// The order of the depth is free as long as both operands have the same. So lanes load 16 consecutive bytes,
// which mma.sync would have in several places.
#pragma once

#include "device/tensor_core.cuh"
#include "ops/cuda/lora_work.cuh"

namespace bequest::cuda::lora {

constexpr int kDepth = 32;  // that a warp multiplies at a time: 8 elements to a lane
constexpr int kStep = kWarps * kDepth;
constexpr int kSteps = kLoraPiece / kStep;
constexpr int kStageSteps = kStageDepth / kStep;

struct Unit {
  int number;  // of the tile
  int part, piece, rank;
  Tile tile;

  __device__ __forceinline__ Unit(const LoraAddParams& p, const Sizes& sizes, int index) {
    number = static_cast<unsigned>(index) / sizes.of_a;
    const int rest = index - number * sizes.of_a;
    part = static_cast<unsigned>(rest) / sizes.pieces;
    piece = rest - part * sizes.pieces;
    tile = tile_of(p.tiles, number);
    rank = rank_of(p.site, tile.slot, part);
  }

  // REQUIRES: there is one more.
  __device__ __forceinline__ void advance(const LoraAddParams& p, const Sizes& sizes) {
    if (++piece < sizes.pieces) return;
    piece = 0;
    if (++part == sizes.parts) {
      part = 0;
      tile = tile_of(p.tiles, ++number);
    }
    rank = rank_of(p.site, tile.slot, part);
  }

  __device__ __forceinline__ int begin() const { return piece * kLoraPiece; }
  __device__ __forceinline__ int depth(const Sizes& sizes) const {
    return min(kLoraPiece, sizes.depth - begin());
  }
};

// Which two rows of x a lane multiplies, of a tile that may not have them. It is known before x is there.
struct TwoRows {
  int low, high;  // -1: the tile has none

  __device__ __forceinline__ TwoRows(const LoraAddParams& p, const Tile& tile, int i)
      : low(row_of(p, tile, i)), high(row_of(p, tile, i + 8)) {}

 private:
  __device__ __forceinline__ static int row_of(const LoraAddParams& p, const Tile& tile, int i) {
    if (i >= tile.count) return -1;
    const int row = __ldg(p.tiles.rows + tile.first + i);
    if (p.tiles.rows_of_x == 1) return row;
    return static_cast<int>(static_cast<unsigned>(row) / static_cast<unsigned>(p.tiles.rows_of_x));
  }
};

// A lane's part of them.
struct Rows {
  uint4 low[kSteps], high[kSteps];

  __device__ __forceinline__ Rows(const LoraAddParams& p, const Sizes& sizes, const TwoRows& of,
                                  const Unit& unit, int place) {
    load(low, p, sizes, of.low, unit, place);
    load(high, p, sizes, of.high, unit, place);
  }

 private:
  __device__ __forceinline__ static void load(uint4 (&to)[kSteps], const LoraAddParams& p, const Sizes& sizes,
                                              int row, const Unit& unit, int place) {
    const int depth = row < 0 ? 0 : unit.depth(sizes);
    const auto* const from = reinterpret_cast<const uint4*>(
        static_cast<const BFloat16*>(p.x) + int64_t{row} * sizes.depth + unit.begin() + place);
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
      to[s] = place + s * kStep < depth ? __ldcg(from + s * (kStep / 8)) : uint4{};
  }
};

// Two steps of 16 of the depth: rows g and g + 8 of the left side, columns g of the right side.
__device__ __forceinline__ void multiply_depth(float (&sum)[4], const uint4& low, const uint4& high,
                                               const uint4& right) {
  multiply_accumulate(sum, {low.x, high.x, low.y, high.y}, right.x, right.y);
  multiply_accumulate(sum, {low.z, high.z, low.w, high.w}, right.z, right.w);
}

// Of 16 rows and 16 ranks, by the warps' parts of the piece; two, so that one can be read while the other is
// written.
struct Sums {
  float of[2][kWarps][kLoraRows][kLoraRanks];
};

// A thread has the sum of one row and one rank: of all warps, in their order.
__device__ __forceinline__ float sum_of_warps(float (&parts)[kWarps][kLoraRows][kLoraRanks],
                                              const float (&sums)[2][4], int warp, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      *reinterpret_cast<float2*>(&parts[warp][lane / 4 + i * 8][half * 8 + lane % 4 * 2]) = {
          sums[half][i * 2], sums[half][i * 2 + 1]};
  sync_threads<1, kConsumers>();
  const int i = threadIdx.x / kLoraRanks, rank = threadIdx.x % kLoraRanks;
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += parts[w][i][rank];
  return sum;
}
static_assert(kConsumers == kLoraRows * kLoraRanks, "a thread for each sum");

// By the warp that has A brought.
__device__ __forceinline__ void bring_a(const LoraAddParams& p, const Sizes& sizes, Run run, Ring& ring,
                                        uint32_t stages, Place& at) {
  if (run.begin == run.end) return;
  const int lane = threadIdx.x % kWarp;
  Unit unit(p, sizes, run.begin);
#pragma unroll 1
  for (int index = run.begin;;) {
    const int depth = unit.depth(sizes);
    const int64_t rows = int64_t{unit.tile.slot * sizes.parts + unit.part} * sizes.most_rank + lane;
    const BFloat16* from = static_cast<const BFloat16*>(p.site.a) + rows * sizes.depth + unit.begin();
#pragma unroll 1
    for (int first = 0; first < unit.rank; first += kLoraRanks, from += int64_t{kLoraRanks} * sizes.depth)
#pragma unroll 1
      for (int begin = 0; begin < depth; begin += kStageDepth) {
        const uint32_t bytes = min(kStageDepth, depth - begin) * 2;
        ring.empty[at.index].wait(at.parity ^ 1);
        if (lane == 0) ring.full[at.index].arrive_expecting(kLoraRanks * bytes);
        __syncwarp();
        if (lane < kLoraRanks)
          copy_run(stages + at.index * kStageBytes + lane * kPitch, from + begin, bytes, ring.full[at.index]);
        at.advance();
      }
    if (++index == run.end) return;
    unit.advance(p, sizes);
  }
}

// The products of a warp's part of a unit with 16 ranks.
__device__ __forceinline__ void multiply_unit(float (&sums)[2][4], const Rows& rows, int depth, Ring& ring,
                                              uint32_t mine, Place& at) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int half = 0; half < kSteps / kStageSteps; ++half) {
    if (half * kStageDepth >= depth) break;
    ring.full[at.index].wait(at.parity);
    const uint32_t from = mine + at.index * kStageBytes;
#pragma unroll
    for (int i = 0; i < kStageSteps; ++i) {
      const int s = half * kStageSteps + i;
      if (static_cast<int>(threadIdx.x) / kWarp * kDepth + s * kStep >= depth) break;
      multiply_depth(sums[0], rows.low[s], rows.high[s], load_16(from + i * kStep * 2));
      multiply_depth(sums[1], rows.low[s], rows.high[s], load_16(from + i * kStep * 2 + 8 * kPitch));
    }
    __syncwarp();
    if (lane == 0) ring.empty[at.index].arrive();
    at.advance();
  }
}

// By the warps that multiply, which have not waited for the kernel ahead. `counts` of tiles are told what is
// there, unless they are null.
__device__ __forceinline__ void shrink(const LoraAddParams& p, const Sizes& sizes, Run run, Ring& ring,
                                       uint32_t stages, Sums& shared, int32_t* counts, Place& at) {
  if (run.begin == run.end) return wait_for_previous();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, i = threadIdx.x / kLoraRanks;
  const int place = warp * kDepth + lane % 4 * 8;
  const uint32_t mine = stages + lane / 4 * kPitch + place * 2;
  int turn = 0;
  Unit unit(p, sizes, run.begin);
  TwoRows of(p, unit.tile, lane / 4);
  wait_for_previous();
#pragma unroll 1
  for (int index = run.begin;;) {
    const Rows rows(p, sizes, of, unit, place);
    const int depth = unit.depth(sizes), row = unit.piece * sizes.num_rows + unit.tile.first + i;
    float* const to =
        p.shrunk + int64_t{row} * sizes.width() + unit.part * sizes.most_rank + threadIdx.x % kLoraRanks;
    const float scale =
        unit.rank == 0 ? 0.0f : __ldg(p.site.scales + unit.tile.slot * sizes.parts + unit.part);
#pragma unroll 1
    for (int first = 0; first < unit.rank; first += kLoraRanks) {
      float sums[2][4] = {};
      multiply_unit(sums, rows, depth, ring, mine, at);
      const float sum = sum_of_warps(shared.of[turn], sums, warp, lane);
      turn ^= 1;
      if (i < unit.tile.count) __stcg(to + first, sum * scale);
    }
    if (counts != nullptr && warp * 2 < unit.tile.count) {
      __syncwarp();
      if (lane == 0) add_one_release(counts + unit.number);
    }
    if (++index == run.end) return;
    unit.advance(p, sizes);
    of = TwoRows(p, unit.tile, lane / 4);
  }
}

}  // namespace bequest::cuda::lora
