// What A has left times B, added to the rows of the product or stored. A unit is 512 columns of y for the
// rows of a tile; 16 ranks of B for these are a buffer of the ring, as they lie. Warps have 64 columns each
// and multiply on tensor cores; of one row they read the same bytes as of 16, and those are what takes the
// time.
//
// A warp has about a microsecond for its part of a unit, or the memory waits for it. So what a tile's units
// have in common is worked out once, groups of columns are told apart only where a warp has columns of
// several parts, or of none, and the memory adds: a warp that reads y first waits for it in every unit.
#pragma once

#include "device/tensor_core.cuh"
#include "device/vectors.cuh"
#include "ops/cuda/lora_work.cuh"

namespace bequest::cuda::lora {

constexpr int kColumns = 8;  // of one mma.sync
constexpr int kGroups = 8;   // of columns that a warp has
constexpr int kWarpColumns = kGroups * kColumns;
constexpr int kUnitColumns = kWarps * kWarpColumns;
constexpr int kColumnBytes = kLoraRanks * 2;
static_assert(kUnitColumns * kColumnBytes <= kStageBytes);
constexpr int kPiecesAtOnce = 8;
constexpr uint32_t kAllGroups = (1u << kGroups) - 1;

// Units [begin, end) of a tile that are the block's.
struct Stretch {
  int tile, begin, end;

  __device__ __forceinline__ Stretch(const Sizes& sizes, Run run) {
    tile = static_cast<unsigned>(run.begin) / sizes.of_b;
    begin = run.begin - tile * sizes.of_b;
    end = min(run.end - tile * sizes.of_b, sizes.of_b);
  }

  // Whether the run goes on behind it.
  __device__ __forceinline__ bool advance(const Sizes& sizes, Run run) {
    begin = 0;
    end = min(run.end - ++tile * sizes.of_b, sizes.of_b);
    return end > 0;
  }
};

// The largest rank of the parts that a unit has columns of; `part`: the first of them.
template <class Ranks>
__device__ __forceinline__ int rank_of_unit(const int* ends, int part, int last_column, Ranks rank) {
  int most = rank(part);
#pragma unroll 1
  while (last_column >= ends[part]) most = max(most, rank(++part));
  return most;
}

// --- the thread that has B brought ------------------------------------------------------------------------

__device__ __forceinline__ void bring_b(const LoraAddParams& p, const Sizes& sizes, Run run, Ring& ring,
                                        uint32_t stages, Place& at) {
  if (run.begin == run.end) return;
  Stretch stretch(sizes, run);
#pragma unroll 1
  do {
    const int slot = tile_of(p.tiles, stretch.tile).slot;
    const auto* const b = static_cast<const BFloat16*>(p.site.b) +
                          int64_t{slot} * sizes.most_rank * sizes.columns;  // R / 16 chunks of N · 16
    int part = 0;
#pragma unroll 1
    for (int unit = stretch.begin; unit < stretch.end; ++unit) {
      const int column = unit * kUnitColumns, end = min(column + kUnitColumns, sizes.columns);
#pragma unroll 1
      while (column >= p.site.ends[part]) ++part;
      const int rank =
          rank_of_unit(p.site.ends, part, end - 1, [&](int of) { return rank_of(p.site, slot, of); });
      const BFloat16* from = b + int64_t{column} * kLoraRanks;
#pragma unroll 1
      for (int first = 0; first < rank; first += kLoraRanks, from += int64_t{sizes.columns} * kLoraRanks) {
        const uint32_t bytes = (end - column) * kColumnBytes;
        ring.empty[at.index].wait(at.parity ^ 1);
        ring.full[at.index].arrive_expecting(bytes);
        copy_run(stages + at.index * kStageBytes, from, bytes, ring.full[at.index]);
        at.advance();
      }
    }
  } while (stretch.advance(sizes, run));
}

// Behind that: tells the other blocks that this one has waited for its tiles, when it has.
__device__ __forceinline__ void leave_tiles(const LoraAddParams& p, const Sizes& sizes, Run run, int units,
                                            Ring& ring) {
  if (run.begin == run.end) return;
  Stretch stretch(sizes, run);
  const int of_block = units_of_block(units);
  int done = 0;
#pragma unroll 1
  do {
    const int first = stretch.tile * sizes.of_b;
    const int readers = (first + sizes.of_b - 1) / of_block - first / of_block + 1;
    ++done;
    while (atomicAdd(&ring.waited, 0) < done) __nanosleep(100);
    leave(p.site.counts + stretch.tile, writers_of(sizes, tile_of(p.tiles, stretch.tile)), readers);
  } while (stretch.advance(sizes, run));
}

// --- the warps that multiply ------------------------------------------------------------------------------

// Of the tile that is multiplied.
struct SharedTile {
  int ranks[kMostLoraParts];
  int ends[kMostLoraParts];
};

// What all pieces of the depth have left for the rows of a tile, to shared memory [16, P R]: of the parts
// that the stretch has columns of. By all of them.
__device__ __forceinline__ void gather_shrunk(const LoraAddParams& p, const Sizes& sizes, const Tile& tile,
                                              const Stretch& stretch, SharedTile& shared, BFloat16* shrunk) {
  const int thread = static_cast<int>(threadIdx.x), row = thread / kLoraRanks;
  const int first_column = stretch.begin * kUnitColumns,
            last_column = min(stretch.end * kUnitColumns, sizes.columns) - 1;
  sync_threads<1, kConsumers>();  // the last tile has been multiplied, and this one has been waited for
  if (thread < sizes.parts) {
    shared.ranks[thread] = rank_of(p.site, tile.slot, thread);
    shared.ends[thread] = p.site.ends[thread];
  }
  const int64_t stride = int64_t{sizes.num_rows} * sizes.width();
#pragma unroll 1
  for (int part = 0; part < sizes.parts && row < tile.count; ++part) {
    if (first_column >= p.site.ends[part]) continue;
    const int rank = rank_of(p.site, tile.slot, part);
#pragma unroll 1
    for (int of = thread % kLoraRanks; of < rank; of += kLoraRanks) {
      const int at = row * sizes.width() + part * sizes.most_rank + of;
      const float* from = p.shrunk + int64_t{tile.first} * sizes.width() + at;
      float sum = 0;
#pragma unroll 1
      for (int piece = 0; piece < sizes.pieces; piece += kPiecesAtOnce, from += kPiecesAtOnce * stride) {
        float values[kPiecesAtOnce];
#pragma unroll
        for (int k = 0; k < kPiecesAtOnce; ++k)
          values[k] = piece + k < sizes.pieces ? __ldcg(from + k * stride) : 0.0f;
#pragma unroll
        for (int k = 0; k < kPiecesAtOnce; ++k) sum += values[k];
      }
      shrunk[at] = narrow<BFloat16>(sum);
    }
    if (last_column < p.site.ends[part]) break;
  }
  sync_threads<1, kConsumers>();
}

// A warp's part of the units of a stretch.
template <bool kStores>
class Multiplier {
 public:
  __device__ __forceinline__ Multiplier(const Sizes& sizes, Ring& ring, const Place& at,
                                        const uint8_t* stages, SharedTile& tile, BFloat16* shrunk)
      : sizes_(sizes),
        ring_(ring),
        at_(at),
        tile_(tile),
        shrunk_(shrunk),
        lane_(threadIdx.x % kWarp),
        first_(threadIdx.x / kWarp * kWarpColumns),
        b_(stages + (first_ + lane_ / 4) * kColumnBytes + lane_ % 4 * 8),
        x_(shrunk + lane_ / 4 * sizes.width() + lane_ % 4 * 4) {}

  // `counts` of tiles say when A's blocks have left all of one; null: they have.
  __device__ __forceinline__ void run(const LoraAddParams& p, const Stretch& stretch, int32_t* counts) {
    const Tile tile = tile_of(p.tiles, stretch.tile);
    low_ = row_of(p, tile, lane_ / 4);
    high_ = row_of(p, tile, lane_ / 4 + 8);
    if (counts != nullptr && threadIdx.x == 0) {
      await_shrunk(counts + stretch.tile, writers_of(sizes_, tile));
      atomicAdd(&ring_.waited, 1);
    }
    gather_shrunk(p, sizes_, tile, stretch, tile_, shrunk_);
    int part_of_unit = 0, part = 0;
#pragma unroll 1
    for (int unit = stretch.begin; unit < stretch.end; ++unit) {
      const int begin = unit * kUnitColumns, end = min(begin + kUnitColumns, sizes_.columns),
                column = begin + first_;
#pragma unroll 1
      while (begin >= tile_.ends[part_of_unit]) ++part_of_unit;
      const int rank =
          rank_of_unit(tile_.ends, part_of_unit, end - 1, [&](int of) { return tile_.ranks[of]; });
      if (column >= sizes_.columns) {
        skip(rank);
        continue;
      }
#pragma unroll 1
      while (column >= tile_.ends[part]) ++part;
      if (column + kWarpColumns <= tile_.ends[part])
        multiply(column, part, rank);
      else
        multiply_parts(column, part, rank);
    }
  }

 private:
  // A lane's first two columns of the tile's row `i`, if it has so many.
  __device__ __forceinline__ BFloat16* row_of(const LoraAddParams& p, const Tile& tile, int i) const {
    if (i >= tile.count) return nullptr;
    const int row = __ldg(p.tiles.rows + tile.first + i);
    return static_cast<BFloat16*>(p.y) + int64_t{row} * sizes_.columns + lane_ % 4 * 2;
  }

  __device__ __forceinline__ static void put(BFloat16* to, float first, float second) {
    const __nv_bfloat162 values = __floats2bfloat162_rn(first, second);
    const uint32_t pair = *reinterpret_cast<const uint32_t*>(&values);
    if constexpr (kStores)
      *reinterpret_cast<uint32_t*>(to) = pair;
    else
      asm volatile("red.relaxed.gpu.global.add.noftz.bf16x2 [%0], %1;" ::"l"(to), "r"(pair) : "memory");
  }

  // Of the groups of columns that get something.
  __device__ __forceinline__ void put_all(int column, uint32_t groups,
                                          const float (&sums)[kGroups][4]) const {
    if (low_ != nullptr) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
        if (groups >> g & 1) put(low_ + column + g * kColumns, sums[g][0], sums[g][1]);
    }
    if (high_ != nullptr) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
        if (groups >> g & 1) put(high_ + column + g * kColumns, sums[g][2], sums[g][3]);
    }
  }

  __device__ __forceinline__ void release() {
    __syncwarp();
    if (lane_ == 0) ring_.empty[at_.index].arrive();
    at_.advance();
  }

  __device__ __forceinline__ void skip(int rank) {
#pragma unroll 1
    for (int begin = 0; begin < rank; begin += kLoraRanks) {
      ring_.full[at_.index].wait(at_.parity);
      release();
    }
  }

  // A chunk of 16 ranks of what A has left, times those of a group of columns.
  __device__ __forceinline__ void multiply_group(float (&sums)[4], const BFloat16* x, int g) const {
    const uint2 low = *reinterpret_cast<const uint2*>(x);
    const uint2 high = *reinterpret_cast<const uint2*>(x + 8 * sizes_.width());
    const uint2 b =
        *reinterpret_cast<const uint2*>(b_ + at_.index * kStageBytes + g * (kColumns * kColumnBytes));
    multiply_accumulate(sums, {low.x, high.x, low.y, high.y}, b.x, b.y);
  }

  // All columns of the warp are of the part.
  __device__ __forceinline__ void multiply(int column, int part, int rank) {
    const int own = tile_.ranks[part];
    if (!kStores && own == 0) return skip(rank);
    float sums[kGroups][4] = {};
#pragma unroll 1
    for (int begin = 0; begin < rank; begin += kLoraRanks) {
      ring_.full[at_.index].wait(at_.parity);
      if (begin < own) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) multiply_group(sums[g], x_ + part * sizes_.most_rank + begin, g);
      }
      release();
    }
    put_all(column, kAllGroups, sums);
  }

  // Some are of another one, or of none.
  __device__ __forceinline__ void multiply_parts(int column, int part, int rank) {
    float sums[kGroups][4] = {};
    uint32_t groups = 0;
#pragma unroll 1
    for (int begin = 0; begin < max(rank, 1); begin += kLoraRanks) {
      if (rank > 0) ring_.full[at_.index].wait(at_.parity);
      int of_group = part;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (column + g * kColumns >= sizes_.columns) break;
#pragma unroll 1
        while (column + g * kColumns >= tile_.ends[of_group]) ++of_group;
        const int own = tile_.ranks[of_group];
        if (kStores || own > 0) groups |= 1u << g;
        if (begin < own) multiply_group(sums[g], x_ + of_group * sizes_.most_rank + begin, g);
      }
      if (rank > 0) release();
    }
    put_all(column, groups, sums);
  }

  const Sizes& sizes_;
  Ring& ring_;
  Place at_;
  SharedTile& tile_;
  BFloat16* const shrunk_;
  const int lane_, first_;
  const uint8_t* const b_;
  const BFloat16* const x_;
  BFloat16 *low_, *high_;
};

}  // namespace bequest::cuda::lora
