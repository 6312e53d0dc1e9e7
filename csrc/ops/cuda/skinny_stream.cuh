// The sizes of skinny_linear_stream.cu and its shared memory.
#pragma once

#include "device/barriers.cuh"
#include "device/reductions.cuh"
#include "ops/cuda/skinny_linear.cuh"
#include "ops/cuda/skinny_stage.cuh"

namespace bequest::cuda {

inline constexpr int kWarps = 8;  // that multiply
inline constexpr int kConsumers = kWarps * kWarp;
inline constexpr int kThreads = kConsumers + kWarp;
inline constexpr int kTileRows = kStageRows;
static_assert(kTileRows == kSkinnyTile && kWarps == kStageWarps);
inline constexpr int kSteps = kStageDepth / kSkinnyDepthUnit;  // accesses of a lane to a stage
// Of k: a step of all warps, and how many of a lane's vectors of x a step and a stage meet.
template <bool kCodes>
inline constexpr int kStepDepth = kCodes ? kSkinnyCodesUnit : kSkinnyDepthUnit;
template <bool kCodes>
inline constexpr int kStepVectors = kCodes ? 2 : 1;
template <bool kCodes>
inline constexpr int kChunkVectors = kSteps * kStepVectors<kCodes>;
inline constexpr int kRowPad = 64;  // bytes: two rows of x that are read at once then lie in different banks
inline constexpr int kMostStages = 12;
inline constexpr int kFewestStages = 4;
inline constexpr int kStagesAlone = 8;
inline constexpr int kMostInFlight = 3;  // stages: more come in the way of each other
// Two kernels share a multiprocessor, the one that works and the one that has begun to read.
// Where rows take so much of it that a ring would be short, one kernel has it all.
// So has a long one: where two find room, those that come in first lie two to a multiprocessor, and others
// are left without.
inline constexpr int64_t kLongShare = 64;  // stages
inline constexpr int kSharedBytes = 112 * 1024, kMostSharedBytes = 220 * 1024;
inline constexpr int kMostStagedBytes = 64 * 1024;  // of x
inline constexpr int kTokenTile = 8;

// Tiles of a round, whose sums are held in registers.
template <int kTokenTiles>
inline constexpr int kRoundTiles = 8 / kTokenTiles;
// Floats from a token's sums to the next one's: tokens that are stored at once then lie in different banks.
template <int kTokenTiles>
inline constexpr int kPartPitch = kRoundTiles<kTokenTiles> * kTileRows + 4;

// Where things lie in dynamic shared memory.
struct Places {
  int row_pitch, rows, gain, squares, parts, total;

  __host__ __device__ Places(const SkinnyLinearParams& p, bool staged, int part_pitch, int stages) {
    const int depth = static_cast<int>(p.in_features), tokens = p.num_tokens;
    row_pitch = depth * 2 + kRowPad;
    rows = stages * kStageBytes;
    gain = rows + (staged ? tokens * row_pitch : 0);
    squares = gain + (p.norm_weight != nullptr ? depth * 2 : 0);
    parts = squares + (p.norm_weight != nullptr ? tokens * (depth / kSkinnyDepthUnit) * 4 : 0);
    parts = (parts + 15) / 16 * 16;
    total = parts + kWarps * tokens * part_pitch * 4;
  }
};

__device__ __forceinline__ void sync_consumers() { sync_threads<1, kConsumers>(); }

}  // namespace bequest::cuda
