// What the two kernels of skinny_linear share.
#pragma once

#include "device/launch.cuh"
#include "ops/cuda/skinny_linear.h"

namespace bequest::cuda {

inline constexpr int kSkinnyWidth = 8;  // bfloat16 of one 16-byte access
inline constexpr int kSkinnyTile = 8;   // rows of W that are multiplied together

// The row of W that is row `i` of a tile. Tiles of a gated product have four rows of the gate and the same
// four of up. Rows beyond the last are the last; nobody stores what becomes of them.
__device__ __forceinline__ int64_t weight_row(const SkinnyLinearParams& p, int tile, int i) {
  if (p.result != SkinnyResult::kGate) return min(int64_t{tile} * kSkinnyTile + i, p.out_features - 1);
  const int64_t half = p.out_features / 2;
  const int64_t row = min(int64_t{tile} * (kSkinnyTile / 2) + i % (kSkinnyTile / 2), half - 1);
  return i < kSkinnyTile / 2 ? row : half + row;
}

// The output that row `i` of a tile makes; rows of up make none of their own.
struct SkinnyOutput {
  int index, stride;  // within the outputs of a token, and their number
  bool exists;

  __device__ SkinnyOutput(const SkinnyLinearParams& p, int tile, int i) {
    const bool gated = p.result == SkinnyResult::kGate;
    const int per_tile = gated ? kSkinnyTile / 2 : kSkinnyTile;
    stride = static_cast<int>(gated ? p.out_features / 2 : p.out_features);
    index = tile * per_tile + i;
    exists = i < per_tile && index < stride;
  }
};

inline int64_t skinny_tiles(const SkinnyLinearParams& p) {
  const bool gated = p.result == SkinnyResult::kGate;
  return gated ? ceil_div(p.out_features / 2, kSkinnyTile / 2) : ceil_div(p.out_features, kSkinnyTile);
}

// Up to kMostStreamedRows, and more. The arguments have been checked.
void skinny_linear_stream(const SkinnyLinearParams& p, Stream stream);
void skinny_linear_mma(const SkinnyLinearParams& p, Stream stream);
bool skinny_stream_norms(int num_tokens, int64_t in_features);

}  // namespace bequest::cuda
