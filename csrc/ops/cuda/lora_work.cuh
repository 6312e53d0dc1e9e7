// How the kernels of lora.h share their work: units of like size, a run of them to each block, whose last
// warp has the copy engine bring what the others multiply.
//
// What an adapter adds is bound by the bytes of A and B. A block that asks for its bytes, waits and ends
// leaves the memory idle while it waits for anything else; a ring of buffers keeps it busy all the time.
#pragma once

#include "core/dtype.h"
#include "device/barriers.cuh"
#include "device/copies.cuh"
#include "device/current_device.cuh"
#include "device/launch.cuh"
#include "device/reductions.cuh"
#include "device/shared_memory.cuh"
#include "ops/cuda/lora.h"

namespace bequest::cuda::lora {

constexpr int kWarps = 8;  // that multiply
constexpr int kConsumers = kWarps * kWarp;
constexpr int kThreads = kConsumers + kWarp;
constexpr int kBlocks = 2;  // of a multiprocessor

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
  return __ldg(site.ranks + int64_t{slot} * site.num_parts + part);
}

// Units [begin, end) of all are this block's.
struct Run {
  int begin, end;
};

__device__ __forceinline__ Run own_run(int64_t units) {
  const int64_t block = blockIdx.x;
  return {static_cast<int>(units * block / gridDim.x), static_cast<int>(units * (block + 1) / gridDim.x)};
}

// Buffers that the copy engine fills and warps empty.
template <int kStages, int kStageBytes>
struct Ring {
  PhaseBarrier full[kStages], empty[kStages];

  // By the whole block.
  __device__ __forceinline__ void init() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) full[i].init(1), empty[i].init(kWarps);
      publish_barriers();
    }
    __syncthreads();
  }
};

inline void check_site(const LoraSite& site) {
  check(site.num_parts >= 1 && site.num_parts <= kMostLoraParts, "lora: parts");
  check(site.most_rank >= 1 && site.most_rank % kLoraRanks == 0, "lora: the rank must be a multiple of 16");
  check(site.in_features >= 1 && site.out_features >= 1, "lora: sizes");
  check(is_aligned(site.a, 16) && is_aligned(site.b, 16), "lora: matrices must be aligned");
}

// Any sizes and types, for tiles whose sums are threads'.
void shrink_rows(const LoraShrinkParams& p, Stream stream);
void expand_rows(const LoraExpandParams& p, Stream stream);

// For so many units at most.
inline unsigned grid_for(int64_t units) {
  return static_cast<unsigned>(std::min<int64_t>(units, int64_t{multiprocessors()} * kBlocks));
}

}  // namespace bequest::cuda::lora
