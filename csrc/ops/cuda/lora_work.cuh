// How the kernel of lora.h shares its work: units of like size, a run of A's and a run of B's to each block,
// whose last warp has the copy engine bring what the others multiply.
//
// What an adapter adds is bound by the bytes of A and B. A block that asks for its bytes, waits and ends
// leaves the memory idle while it waits for anything else; a ring of buffers keeps it busy all the time. B
// does not depend on rows, so it is on its way while blocks wait for what others have made of A.
//
// A block passes once through its instructions, and fetching them takes as long as bytes do. So sizes are
// 32 bits wide, units are walked without divisions, and loops stay loops.
#pragma once

#include "core/dtype.h"
#include "device/barriers.cuh"
#include "device/copies.cuh"
#include "device/current_device.cuh"
#include "device/exchange.cuh"
#include "device/launch.cuh"
#include "device/reductions.cuh"
#include "device/shared_memory.cuh"
#include "ops/cuda/lora.h"

namespace bequest::cuda::lora {

constexpr int kWarps = 8;  // that multiply
constexpr int kConsumers = kWarps * kWarp;
constexpr int kThreads = kConsumers + kWarp;
constexpr int kBlocks = 2;  // of a multiprocessor, at most

constexpr int kStages = 5;
constexpr int kStageDepth = kLoraPiece / 2;
constexpr int kPitch = kStageDepth * 2 + 64;  // bytes of a rank of A: two of them lie in different banks
constexpr int kStageBytes = kLoraRanks * kPitch;

struct Tile {
  int first, count, slot;
};

// Tiles and slots do not change while a step runs.
__device__ __forceinline__ int num_tiles(const LoraTiles& tiles) { return __ldg(tiles.tiles); }

__device__ __forceinline__ Tile tile_of(const LoraTiles& tiles, int index) {
  const int32_t* const tile = tiles.tiles + (index + 1) * 3;
  return {__ldg(tile), __ldg(tile + 1), __ldg(tile + 2)};
}

__device__ __forceinline__ int rank_of(const LoraSite& site, int slot, int part) {
  if (slot < 0) return 0;
  return __ldg(site.ranks + slot * static_cast<int>(site.num_parts) + part);
}

// The sizes of a launch, as its blocks compute with them.
struct Sizes {
  int parts, pieces, most_rank, depth, columns, num_rows;
  int of_a, of_b;  // units of a tile

  __device__ __forceinline__ int width() const { return parts * most_rank; }
};

// Units [begin, end) of all are this block's; all but the last have the same number, and the last may have
// none.
struct Run {
  int begin, end;
};

__device__ __forceinline__ int units_of_block(int units) {
  return static_cast<int>((static_cast<unsigned>(units) + gridDim.x - 1) / gridDim.x);
}

__device__ __forceinline__ Run own_run(int units) {
  const int each = units_of_block(units), begin = min(static_cast<int>(blockIdx.x) * each, units);
  return {begin, min(begin + each, units)};
}

// Buffers that the copy engine fills and warps empty.
struct Ring {
  PhaseBarrier full[kStages], empty[kStages];
  int waited;  // stretches of B that the block waits for no more

  // By the whole block.
  __device__ __forceinline__ void init() {
    if (threadIdx.x == 0) {
#pragma unroll 1
      for (int i = 0; i < kStages; ++i) full[i].init(1), empty[i].init(kWarps);
      waited = 0;
      publish_barriers();
    }
    __syncthreads();
  }
};

using Place = Cursor<kStages>;

// --- what blocks tell each other of a tile ----------------------------------------------------------------

constexpr int kReader = 1 << 16;  // what a block that has B adds to a tile's counter, above what A's add

// Warps of A's blocks that leave something: a warp has two rows.
__device__ __forceinline__ int writers_of(const Sizes& sizes, const Tile& tile) {
  return sizes.of_a * ((tile.count + 1) / 2);
}

// Until all of it is there. By one thread.
__device__ __forceinline__ void await_shrunk(const int32_t* counter, int writers) {
  Patience patience;
  while (load_acquire(counter) % kReader < writers) patience.spend();
}

// When the block waits for it no more. The last one leaves the counter as the next launch expects it.
__device__ __forceinline__ void leave(int32_t* counter, int writers, int readers) {
  if (atomicAdd(counter, kReader) == writers + (readers - 1) * kReader) *counter = 0;
}

// --- launchers --------------------------------------------------------------------------------------------

inline void check_site(const LoraSite& site) {
  check(site.num_parts >= 1 && site.num_parts <= kMostLoraParts, "lora: parts");
  check(site.most_rank >= 1 && site.most_rank % kLoraRanks == 0, "lora: the rank must be a multiple of 16");
  check(site.in_features >= 1 && site.out_features >= 1, "lora: sizes");
  check(is_aligned(site.a, 16) && is_aligned(site.b, 16), "lora: matrices must be aligned");
}

// Any sizes and types, for tiles whose sums are threads'.
void shrink_rows(const LoraAddParams& p, Stream stream);
void expand_rows(const LoraAddParams& p, Stream stream);

}  // namespace bequest::cuda::lora
