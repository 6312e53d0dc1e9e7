// x times A. A unit is a piece of the depth of one part, for the rows of a tile; 16 ranks of it are a buffer
// of the ring. Warps multiply a part of the piece each, on tensor cores, and add what they have in their
// order. B's kernel adds the pieces.
//
// The order of the depth is free as long as both operands have the same. So lanes load 16 consecutive bytes,
// which mma.sync would have in several places.
#include <algorithm>

#include "device/tensor_core.cuh"
#include "ops/cuda/lora_work.cuh"

namespace bequest::cuda {
namespace lora {
namespace {

constexpr int kDepth = 32;  // that a warp multiplies at a time: 8 elements to a lane
constexpr int kStep = kWarps * kDepth;
constexpr int kSteps = kLoraPiece / kStep;
constexpr int kPitch = kLoraPiece * 2 + 64;  // bytes of a rank: two of them lie in different banks
constexpr int kStageBytes = kLoraRanks * kPitch;
constexpr int kStages = 2;

struct Unit {
  Tile tile;
  int part, begin, depth, rank;  // of A: where the piece begins, and how long it is
};

__device__ __forceinline__ Unit unit_of(const LoraShrinkParams& p, int index) {
  const LoraSite& site = p.site;
  const int pieces = static_cast<int>(lora_pieces(site.in_features)),
            parts = static_cast<int>(site.num_parts);
  Unit unit;
  unit.tile = tile_of(p.tiles, index / (parts * pieces));
  unit.part = index / pieces % parts;
  unit.begin = index % pieces * kLoraPiece;
  unit.depth = min(kLoraPiece, static_cast<int>(site.in_features) - unit.begin);
  unit.rank = rank_of(site, unit.tile.slot, unit.part);
  return unit;
}

// A lane's part of up to 16 rows of x, of which a tile has `count`.
struct Rows {
  uint4 low[kSteps], high[kSteps];

  __device__ __forceinline__ void load(const LoraShrinkParams& p, const Unit& unit, int warp, int lane) {
    load_row(low, p, unit, lane / 4, warp * kDepth + lane % 4 * 8);
    load_row(high, p, unit, lane / 4 + 8, warp * kDepth + lane % 4 * 8);
  }

 private:
  __device__ __forceinline__ static void load_row(uint4 (&to)[kSteps], const LoraShrinkParams& p,
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

using Buffers = Ring<kStages, kStageBytes>;

__device__ __forceinline__ void bring(const LoraShrinkParams& p, Run run, Buffers& ring, uint32_t stages) {
  const int lane = threadIdx.x % kWarp;
  const int64_t depth = p.site.in_features;
  Cursor<kStages> at;
  for (int index = run.begin; index < run.end; ++index) {
    const Unit unit = unit_of(p, index);
    const int64_t rows = (int64_t{unit.tile.slot} * p.site.num_parts + unit.part) * p.site.most_rank;
    const BFloat16* const a = static_cast<const BFloat16*>(p.site.a) + rows * depth + unit.begin;
    for (int first = 0; first < unit.rank; first += kLoraRanks) {
      ring.empty[at.index].wait(at.parity ^ 1);
      if (lane == 0) ring.full[at.index].arrive_expecting(kLoraRanks * unit.depth * 2);
      __syncwarp();
      if (lane < kLoraRanks)
        copy_run(stages + at.index * kStageBytes + lane * kPitch, a + (first + lane) * depth, unit.depth * 2,
                 ring.full[at.index]);
      at.advance();
    }
  }
}

__device__ __forceinline__ void multiply(const LoraShrinkParams& p, Run run, Buffers& ring, uint32_t stages,
                                         Sums& shared) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, i = threadIdx.x / kLoraRanks;
  const int64_t width = p.site.num_parts * p.site.most_rank;
  const uint32_t mine = stages + lane / 4 * kPitch + (warp * kDepth + lane % 4 * 8) * 2;
  Cursor<kStages> at;
  int turn = 0;
  for (int index = run.begin; index < run.end; ++index) {
    const Unit unit = unit_of(p, index);
    if (unit.rank == 0) continue;
    Rows rows;
    rows.load(p, unit, warp, lane);
    const float scale = __ldg(p.site.scales + unit.tile.slot * p.site.num_parts + unit.part);
    float* const to = p.shrunk +
                      (int64_t{unit.begin / kLoraPiece} * p.num_rows + unit.tile.first + i) * width +
                      unit.part * p.site.most_rank + threadIdx.x % kLoraRanks;
#pragma unroll 1
    for (int first = 0; first < unit.rank; first += kLoraRanks) {
      float sums[2][4] = {};
      ring.full[at.index].wait(at.parity);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        if (warp * kDepth + s * kStep >= unit.depth) break;
        const uint32_t from = mine + at.index * kStageBytes + s * kStep * 2;
        multiply_depth(sums[0], rows.low[s], rows.high[s], load_16(from));
        multiply_depth(sums[1], rows.low[s], rows.high[s], load_16(from + 8 * kPitch));
      }
      __syncwarp();
      if (lane == 0) ring.empty[at.index].arrive();
      at.advance();
      const float sum = sum_of_warps(shared.of[turn], sums, warp, lane);
      turn ^= 1;
      if (i < unit.tile.count) to[first] = sum * scale;
    }
  }
}

__global__ __launch_bounds__(kThreads,
                             kBlocks) void shrink_kernel(const __grid_constant__ LoraShrinkParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ Buffers ring;
  __shared__ Sums sums;
  let_next_start();
  ring.init();
  if (p.tiles.made_in_step) wait_for_previous();
  const Run run = own_run(num_tiles(p.tiles) * p.site.num_parts * lora_pieces(p.site.in_features));
  const uint32_t stages = shared_address(shared);
  if (threadIdx.x >= kConsumers) return bring(p, run, ring, stages);
  wait_for_previous();
  multiply(p, run, ring, stages, sums);
}

}  // namespace
}  // namespace lora

void lora_shrink(const LoraShrinkParams& p, Stream stream) {
  lora::check_site(p.site);
  check(p.tiles.rows_of_x >= 1 && p.tiles.rows_of_x <= INT32_MAX, "lora_shrink: rows of x");
  if (!p.site.has_tensor_cores()) return lora::shrink_rows(p, stream);
  check(is_aligned(p.x, 16), "lora_shrink: rows must be aligned");
  const int64_t units = p.tiles.most_tiles * p.site.num_parts * lora_pieces(p.site.in_features);
  launch(lora::shrink_kernel,
         {.grid = lora::grid_for(units),
          .block = lora::kThreads,
          .shared_bytes = size_t{lora::kStages} * lora::kStageBytes,
          .overlaps_previous = true},
         stream, p);
}

}  // namespace bequest::cuda
