// How the kernel of lora.h shares its work: units of like size, a run of A's and a run of B's to each block,
// whose last warp has the copy engine bring what the others multiply.
//
// What an adapter adds is bound by the bytes of A and B. A block that asks for its bytes, waits and ends
// leaves the memory idle while it waits for anything else; a ring of buffers keeps it busy all the time. B
// does not depend on rows, so it is on its way while blocks wait for what others have made of A.
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
  const int32_t* const tile = tiles.tiles + int64_t{index + 1} * 3;
  return {__ldg(tile), __ldg(tile + 1), __ldg(tile + 2)};
}

__device__ __forceinline__ int rank_of(const LoraSite& site, int slot, int part) {
  if (slot < 0) return 0;
  return __ldg(site.ranks + int64_t{slot} * site.num_parts + part);
}

// Units [begin, end) of all are this block's. Where there are fewer than blocks, the last have none.
struct Run {
  int begin, end;
};

__device__ __forceinline__ Run own_run(int64_t units) {
  const int64_t block = blockIdx.x, blocks = min(int64_t{gridDim.x}, units);
  if (block >= blocks) return {0, 0};
  return {static_cast<int>(units * block / blocks), static_cast<int>(units * (block + 1) / blocks)};
}

// The block whose run has the unit.
__device__ __forceinline__ int block_of(int64_t units, int64_t unit) {
  const int64_t blocks = min(int64_t{gridDim.x}, units);
  return static_cast<int>(((unit + 1) * blocks - 1) / units);
}

// Buffers that the copy engine fills and warps empty.
struct Ring {
  PhaseBarrier full[kStages], empty[kStages];
  int waited;  // stretches of B that the block waits for no more

  // By the whole block.
  __device__ __forceinline__ void init() {
    if (threadIdx.x == 0) {
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
__device__ __forceinline__ int writers_of(const LoraSite& site, const Tile& tile) {
  return static_cast<int>(site.num_parts * lora_pieces(site.in_features)) * ((tile.count + 1) / 2);
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
