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
  Tile tile;
  int number;                    // of the tile
  int part, begin, depth, rank;  // of A: where the piece begins, and how long it is
};

__host__ __device__ __forceinline__ int shrink_units(const LoraSite& site) {
  return static_cast<int>(site.num_parts * lora_pieces(site.in_features));
}

__device__ __forceinline__ Unit unit_of(const LoraAddParams& p, int index) {
  const LoraSite& site = p.site;
  const int pieces = static_cast<int>(lora_pieces(site.in_features)),
            parts = static_cast<int>(site.num_parts);
  Unit unit;
  unit.number = index / (parts * pieces);
  unit.tile = tile_of(p.tiles, unit.number);
  unit.part = index / pieces % parts;
  unit.begin = index % pieces * kLoraPiece;
  unit.depth = min(kLoraPiece, static_cast<int>(site.in_features) - unit.begin);
  unit.rank = rank_of(site, unit.tile.slot, unit.part);
  return unit;
}

// A lane's part of up to 16 rows of x, of which a tile has `count`.
struct Rows {
  uint4 low[kSteps], high[kSteps];

  __device__ __forceinline__ void load(const LoraAddParams& p, const Unit& unit, int warp, int lane) {
    load_row(low, p, unit, lane / 4, warp * kDepth + lane % 4 * 8);
    load_row(high, p, unit, lane / 4 + 8, warp * kDepth + lane % 4 * 8);
  }

 private:
  __device__ __forceinline__ static void load_row(uint4 (&to)[kSteps], const LoraAddParams& p,
                                                  const Unit& unit, int i, int place) {
    const bool exists = i < unit.tile.count;
    const int row = exists ? __ldg(p.tiles.rows + unit.tile.first + i) : 0;
    const auto* const from = reinterpret_cast<const uint4*>(
        static_cast<const BFloat16*>(p.x) + row / static_cast<int>(p.tiles.rows_of_x) * p.site.in_features +
        unit.begin + place);
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
      to[s] = exists && place + s * kStep < unit.depth ? __ldcg(from + s * (kStep / 8)) : uint4{};
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
    for (int i = 0; i < 4; ++i)
      parts[warp][lane / 4 + i / 2 * 8][half * 8 + lane % 4 * 2 + i % 2] = sums[half][i];
  sync_threads<1, kConsumers>();
  const int i = threadIdx.x / kLoraRanks, rank = threadIdx.x % kLoraRanks;
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += parts[w][i][rank];
  return sum;
}
static_assert(kConsumers == kLoraRows * kLoraRanks, "a thread for each sum");

// By the warp that has A brought.
__device__ __forceinline__ void bring_a(const LoraAddParams& p, Run run, Ring& ring, uint32_t stages,
                                        Place& at) {
  const int lane = threadIdx.x % kWarp;
  const int64_t depth = p.site.in_features;
  for (int index = run.begin; index < run.end; ++index) {
    const Unit unit = unit_of(p, index);
    const int64_t rows = (int64_t{unit.tile.slot} * p.site.num_parts + unit.part) * p.site.most_rank;
    const BFloat16* const a = static_cast<const BFloat16*>(p.site.a) + rows * depth + unit.begin;
    for (int first = 0; first < unit.rank; first += kLoraRanks)
      for (int begin = 0; begin < unit.depth; begin += kStageDepth) {
        const uint32_t bytes = min(kStageDepth, unit.depth - begin) * 2;
        ring.empty[at.index].wait(at.parity ^ 1);
        if (lane == 0) ring.full[at.index].arrive_expecting(kLoraRanks * bytes);
        __syncwarp();
        if (lane < kLoraRanks)
          copy_run(stages + at.index * kStageBytes + lane * kPitch, a + (first + lane) * depth + begin, bytes,
                   ring.full[at.index]);
        at.advance();
      }
  }
}

// The products of a warp's part of a unit with 16 ranks.
__device__ __forceinline__ void multiply_unit(float (&sums)[2][4], const Rows& rows, int depth, Ring& ring,
                                              uint32_t mine, Place& at) {
  const int lane = threadIdx.x % kWarp, first = threadIdx.x / kWarp * kDepth;
#pragma unroll
  for (int half = 0; half < kSteps / kStageSteps; ++half) {
    if (half * kStageDepth >= depth) break;
    ring.full[at.index].wait(at.parity);
#pragma unroll
    for (int i = 0; i < kStageSteps; ++i) {
      const int s = half * kStageSteps + i;
      if (first + s * kStep >= depth) break;
      const uint32_t from = mine + at.index * kStageBytes + i * kStep * 2;
      multiply_depth(sums[0], rows.low[s], rows.high[s], load_16(from));
      multiply_depth(sums[1], rows.low[s], rows.high[s], load_16(from + 8 * kPitch));
    }
    __syncwarp();
    if (lane == 0) ring.empty[at.index].arrive();
    at.advance();
  }
}

// By the warps that multiply. `counts` of tiles are told what is there, unless they are null.
__device__ __forceinline__ void shrink(const LoraAddParams& p, Run run, Ring& ring, uint32_t stages,
                                       Sums& shared, int32_t* counts, Place& at) {
  if (run.begin == run.end) return;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, i = threadIdx.x / kLoraRanks;
  const int64_t width = p.site.num_parts * p.site.most_rank;
  const uint32_t mine = stages + lane / 4 * kPitch + (warp * kDepth + lane % 4 * 8) * 2;
  int turn = 0;
  Unit unit = unit_of(p, run.begin);
  Rows rows;
  rows.load(p, unit, warp, lane);
#pragma unroll 1
  for (int index = run.begin; index < run.end; ++index) {
    const Unit own = unit;
    if (index + 1 < run.end) unit = unit_of(p, index + 1);
    const float scale =
        own.rank == 0 ? 0.0f : __ldg(p.site.scales + own.tile.slot * p.site.num_parts + own.part);
    float* const to = p.shrunk + (int64_t{own.begin / kLoraPiece} * p.num_rows + own.tile.first + i) * width +
                      own.part * p.site.most_rank + threadIdx.x % kLoraRanks;
#pragma unroll 1
    for (int first = 0; first < own.rank; first += kLoraRanks) {
      float sums[2][4] = {};
      multiply_unit(sums, rows, own.depth, ring, mine, at);
      // Asked for before the warps meet.
      if (first + kLoraRanks >= own.rank && index + 1 < run.end) rows.load(p, unit, warp, lane);
      const float sum = sum_of_warps(shared.of[turn], sums, warp, lane);
      turn ^= 1;
      if (i < own.tile.count) __stcg(to + first, sum * scale);
    }
    if (own.rank == 0 && index + 1 < run.end) rows.load(p, unit, warp, lane);
    if (counts == nullptr || warp * 2 >= own.tile.count) continue;
    __syncwarp();
    if (lane == 0) add_one_release(counts + own.number);
  }
}

}  // namespace bequest::cuda::lora
