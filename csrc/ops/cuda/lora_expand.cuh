// What A has left times B, added to the rows of the product. A unit is 512 columns of y for the rows of a
// tile; 16 ranks of B for these are a buffer of the ring, as they lie. Warps have 64 columns each and
// multiply on tensor cores; of one row they read the same bytes as of 16, and those are what takes the time.
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
constexpr int kPiecesAtOnce = 16;
constexpr uint32_t kAllGroups = (1u << kGroups) - 1;

__host__ __device__ __forceinline__ int expand_units(const LoraSite& site) {
  return static_cast<int>((site.out_features + kUnitColumns - 1) / kUnitColumns);
}

__device__ __forceinline__ int part_of(const LoraSite& site, int column) {
  int part = 0;
  while (column >= site.ends[part]) ++part;
  return part;
}

// Units [begin, end) of a tile that are the block's.
struct Stretch {
  int tile, begin, end;
};

// The next stretch of a run, whose units are counted through all tiles.
__device__ __forceinline__ Stretch take_stretch(Run& run, int each) {
  const int tile = run.begin / each, first = tile * each;
  const Stretch stretch{tile, run.begin - first, min(run.end - first, each)};
  run.begin = first + stretch.end;
  return stretch;
}

// --- the thread that has B brought
// --------------------------------------------------------------------------

__device__ __forceinline__ void bring_b(const LoraAddParams& p, Run run, Ring& ring, uint32_t stages,
                                        Place& at) {
  const LoraSite& site = p.site;
  const int columns = static_cast<int>(site.out_features), each = expand_units(site);
  while (run.begin < run.end) {
    const Stretch stretch = take_stretch(run, each);
    const int slot = tile_of(p.tiles, stretch.tile).slot;
    const auto* const b = static_cast<const BFloat16*>(site.b) +
                          int64_t{slot} * (site.most_rank / kLoraRanks) * columns * kLoraRanks;
    int part = part_of(site, stretch.begin * kUnitColumns);
    for (int unit = stretch.begin; unit < stretch.end; ++unit) {
      const int column = unit * kUnitColumns, end = min(column + kUnitColumns, columns);
      while (column >= site.ends[part]) ++part;
      int rank = rank_of(site, slot, part);
      for (int more = part; end > site.ends[more];) rank = max(rank, rank_of(site, slot, ++more));
      for (int chunk = 0; chunk < rank / kLoraRanks; ++chunk) {
        const uint32_t bytes = (end - column) * kColumnBytes;
        ring.empty[at.index].wait(at.parity ^ 1);
        ring.full[at.index].arrive_expecting(bytes);
        copy_run(stages + at.index * kStageBytes, b + (int64_t{chunk} * columns + column) * kLoraRanks, bytes,
                 ring.full[at.index]);
        at.advance();
      }
    }
  }
}

// Behind that: tells the other blocks that this one has waited for its tiles, when it has.
__device__ __forceinline__ void leave_tiles(const LoraAddParams& p, Run run, int64_t units, Ring& ring,
                                            int32_t* counts) {
  const int each = expand_units(p.site);
  for (int done = 1; run.begin < run.end; ++done) {
    const int tile = take_stretch(run, each).tile;
    const int64_t first = int64_t{tile} * each;
    const int readers = block_of(units, first + each - 1) - block_of(units, first) + 1;
    while (atomicAdd(&ring.waited, 0) < done) __nanosleep(100);
    leave(counts + tile, writers_of(p.site, tile_of(p.tiles, tile)), readers);
  }
}

// --- the warps that multiply
// --------------------------------------------------------------------------------

// Of the tile that is multiplied.
struct SharedTile {
  int ranks[kMostLoraParts];
  int ends[kMostLoraParts];
};

// What all pieces of the depth have left for the rows of a tile, to shared memory [16, P R]: of the parts
// that the stretch has columns of. By all of them.
__device__ __forceinline__ void gather_shrunk(const LoraAddParams& p, const Tile& tile,
                                              const Stretch& stretch, SharedTile& shared, BFloat16* shrunk) {
  const LoraSite& site = p.site;
  const int most_rank = static_cast<int>(site.most_rank), parts = static_cast<int>(site.num_parts);
  const int pieces = static_cast<int>(lora_pieces(site.in_features)), width = parts * most_rank;
  const int last_column = min(stretch.end * kUnitColumns, static_cast<int>(site.out_features)) - 1;
  const int64_t stride = p.num_rows * width;
  sync_threads<1, kConsumers>();  // the last tile has been multiplied, and this one has been waited for
  if (threadIdx.x < parts) {
    shared.ranks[threadIdx.x] = rank_of(site, tile.slot, static_cast<int>(threadIdx.x));
    shared.ends[threadIdx.x] = site.ends[threadIdx.x];
  }
  const int last = part_of(site, last_column);
#pragma unroll 1
  for (int part = part_of(site, stretch.begin * kUnitColumns); part <= last; ++part) {
    const int rank = rank_of(site, tile.slot, part);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < tile.count * rank; i += kConsumers) {
      const int row = i / rank, at = row * width + part * most_rank + i % rank;
      const float* const from = p.shrunk + int64_t{tile.first} * width + at;
      float sum = 0;
#pragma unroll 1
      for (int first = 0; first < pieces; first += kPiecesAtOnce) {
        float of[kPiecesAtOnce];
#pragma unroll
        for (int k = 0; k < kPiecesAtOnce; ++k)
          of[k] = first + k < pieces ? __ldcg(from + (first + k) * stride) : 0.0f;
#pragma unroll
        for (int k = 0; k < kPiecesAtOnce; ++k) sum += of[k];
      }
      shrunk[at] = narrow<BFloat16>(sum);
    }
  }
  sync_threads<1, kConsumers>();
}

// A lane's two columns of a row of y in each of its warp's groups.
class Columns {
 public:
  // Of the tile's row `i`, if it has so many.
  __device__ __forceinline__ void set_row(const LoraAddParams& p, const Tile& tile, int i, int column) {
    row_ = nullptr;
    if (i >= tile.count) return;
    const int64_t row = __ldg(p.tiles.rows + tile.first + i);
    row_ = static_cast<BFloat16*>(p.y) + row * p.site.out_features + column;
  }

  __device__ __forceinline__ void put(int column, float first, float second, bool stores) const {
    if (row_ == nullptr) return;
    const __nv_bfloat162 values = __floats2bfloat162_rn(first, second);
    const uint32_t pair = *reinterpret_cast<const uint32_t*>(&values);
    if (stores)
      *reinterpret_cast<uint32_t*>(row_ + column) = pair;
    else
      asm volatile("red.relaxed.gpu.global.add.noftz.bf16x2 [%0], %1;" ::"l"(row_ + column), "r"(pair)
                   : "memory");
  }

 private:
  BFloat16* row_;
};

// A warp's part of the units of a stretch.
class Multiplier {
 public:
  __device__ __forceinline__ Multiplier(const LoraAddParams& p, Ring& ring, const Place& at,
                                        const uint8_t* stages, SharedTile& tile, BFloat16* shrunk)
      : ring_(ring),
        at_(at),
        tile_(tile),
        shrunk_(shrunk),
        stores_(p.stores),
        columns_(static_cast<int>(p.site.out_features)),
        most_rank_(static_cast<int>(p.site.most_rank)),
        width_(static_cast<int>(p.site.num_parts) * most_rank_),
        lane_(threadIdx.x % kWarp),
        first_(threadIdx.x / kWarp * kWarpColumns),
        b_(stages + (first_ + lane_ / 4) * kColumnBytes + lane_ % 4 * 8),
        x_(shrunk + lane_ / 4 * width_ + lane_ % 4 * 4) {}

  // `counts` of tiles say when A's blocks have left all of one; null: they have.
  __device__ __forceinline__ void run(const LoraAddParams& p, const Stretch& stretch, int32_t* counts) {
    const Tile tile = tile_of(p.tiles, stretch.tile);
    low_.set_row(p, tile, lane_ / 4, lane_ % 4 * 2);
    high_.set_row(p, tile, lane_ / 4 + 8, lane_ % 4 * 2);
    if (counts != nullptr && threadIdx.x == 0) {
      await_shrunk(counts + stretch.tile, writers_of(p.site, tile));
      atomicAdd(&ring_.waited, 1);
    }
    gather_shrunk(p, tile, stretch, tile_, shrunk_);
    int part_of_unit = 0, part = 0;
#pragma unroll 1
    for (int unit = stretch.begin; unit < stretch.end; ++unit) {
      const int begin = unit * kUnitColumns, end = min(begin + kUnitColumns, columns_),
                column = begin + first_;
      while (begin >= tile_.ends[part_of_unit]) ++part_of_unit;
      int rank = tile_.ranks[part_of_unit];
      for (int more = part_of_unit; end > tile_.ends[more];) rank = max(rank, tile_.ranks[++more]);
      if (column >= columns_) {
        skip(rank);
        continue;
      }
      while (column >= tile_.ends[part]) ++part;
      if (column + kWarpColumns <= tile_.ends[part])
        multiply<true>(column, part, rank);
      else
        multiply<false>(column, part, rank);
    }
  }

 private:
  // Groups of columns that get something.
  __device__ __forceinline__ uint32_t touched(int column, int part) const {
    uint32_t groups = 0;
    for (int g = 0; g < kGroups && column + g * kColumns < columns_; ++g) {
      while (column + g * kColumns >= tile_.ends[part]) ++part;
      if (stores_ || tile_.ranks[part] > 0) groups |= 1u << g;
    }
    return groups;
  }

  __device__ __forceinline__ void release() {
    __syncwarp();
    if (lane_ == 0) ring_.empty[at_.index].arrive();
    at_.advance();
  }

  __device__ __forceinline__ void skip(int rank) {
    for (int begin = 0; begin < rank; begin += kLoraRanks) {
      ring_.full[at_.index].wait(at_.parity);
      release();
    }
  }

  // kWhole: all columns of the warp are of the part.
  template <bool kWhole>
  __device__ __forceinline__ void multiply(int column, int part, int rank) {
    const uint32_t groups =
        kWhole ? (stores_ || tile_.ranks[part] > 0 ? kAllGroups : 0) : touched(column, part);
    if (groups == 0) return skip(rank);
    float sums[kGroups][4] = {};
#pragma unroll 1
    for (int begin = 0; begin < rank; begin += kLoraRanks) {
      ring_.full[at_.index].wait(at_.parity);
      const uint8_t* const b = b_ + at_.index * kStageBytes;
      uint2 of_b[kGroups];
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
        of_b[g] = *reinterpret_cast<const uint2*>(b + g * (kColumns * kColumnBytes));
      int of_group = part;
      const BFloat16* x = x_ + part * most_rank_ + begin;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if constexpr (!kWhole) {
          if (!(groups >> g & 1)) continue;
          while (column + g * kColumns >= tile_.ends[of_group]) ++of_group;
          x = x_ + of_group * most_rank_ + begin;
        }
        if (begin >= tile_.ranks[of_group]) continue;
        const uint2 low = *reinterpret_cast<const uint2*>(x);
        const uint2 high = *reinterpret_cast<const uint2*>(x + 8 * width_);
        multiply_accumulate(sums[g], {low.x, high.x, low.y, high.y}, of_b[g].x, of_b[g].y);
      }
      release();
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (!kWhole && !(groups >> g & 1)) continue;
      low_.put(column + g * kColumns, sums[g][0], sums[g][1], stores_);
      high_.put(column + g * kColumns, sums[g][2], sums[g][3], stores_);
    }
  }

  Ring& ring_;
  Place at_;
  SharedTile& tile_;
  BFloat16* const shrunk_;
  const bool stores_;
  const int columns_, most_rank_, width_, lane_, first_;
  const uint8_t* const b_;
  const BFloat16* const x_;
  Columns low_, high_;
};

}  // namespace bequest::cuda::lora
