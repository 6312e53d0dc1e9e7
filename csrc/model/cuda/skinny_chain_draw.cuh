// The best of many, by a warp: each lane has keys of experts 4 l to 4 l + 3, and of 128 further on. Larger
// keys are better, and no two are equal.
#pragma once

#include "device/reductions.cuh"
#include "model/cuda/skinny_chain.cuh"

namespace bequest::cuda::chain {

inline constexpr int kQuad = 4;  // experts that follow each other lie in a lane: two words
inline constexpr uint32_t kNobody = 0;

__device__ __forceinline__ void put_in_order(uint32_t& better, uint32_t& worse) {
  const uint32_t best = max(better, worse);
  worse = min(better, worse);
  better = best;
}

// The best of the warp's keys.
template <int kPerLane>
__device__ __forceinline__ uint32_t best_of(const uint32_t (&keys)[kPerLane]) {
  uint32_t best = keys[0];
#pragma unroll
  for (int i = 1; i < kPerLane; ++i) best = max(best, keys[i]);
  return __reduce_max_sync(kAllLanes, best);
}

// The best `count` of the warp's keys: lane l has that of rank l.
template <int kPerLane>
__device__ __forceinline__ uint32_t draw(uint32_t (&keys)[kPerLane], int count, int lane) {
  // Each four in order, so that only the first ones are looked at.
#pragma unroll
  for (int i = 0; i < kPerLane; i += kQuad) {
    put_in_order(keys[i], keys[i + 1]);
    put_in_order(keys[i + 2], keys[i + 3]);
    put_in_order(keys[i], keys[i + 2]);
    put_in_order(keys[i + 1], keys[i + 3]);
    put_in_order(keys[i + 1], keys[i + 2]);
  }
  uint32_t mine = kNobody;
#pragma unroll 1
  for (int rank = 0; rank < count; ++rank) {
    uint32_t best = keys[0];
#pragma unroll
    for (int i = kQuad; i < kPerLane; i += kQuad) best = max(best, keys[i]);
    best = __reduce_max_sync(kAllLanes, best);
    if (lane == rank) mine = best;
#pragma unroll
    for (int i = 0; i < kPerLane; i += kQuad) {
      const bool is_own = keys[i] == best;
      keys[i] = is_own ? keys[i + 1] : keys[i];
      keys[i + 1] = is_own ? keys[i + 2] : keys[i + 1];
      keys[i + 2] = is_own ? keys[i + 3] : keys[i + 2];
      keys[i + 3] = is_own ? kNobody : keys[i + 3];
    }
  }
  return mine;
}

// How many of the first `count` lanes have smaller ids.
__device__ __forceinline__ int place_by_id(int id, int count) {
  int place = 0;
#pragma unroll 1
  for (int rank = 0; rank < count; ++rank) place += __shfl_sync(kAllLanes, id, rank) < id ? 1 : 0;
  return place;
}

// Which of a lane's keys is of this expert, and which lane's.
__device__ __forceinline__ int index_of(int expert) {
  return expert / (kQuad * kWarp) * kQuad + expert % kQuad;
}
__device__ __forceinline__ int lane_of(int expert) { return expert / kQuad % kWarp; }

// Of an index of a lane's keys.
__device__ __forceinline__ int expert_at(int index, int lane) {
  return index / kQuad * (kQuad * kWarp) + lane * kQuad + index % kQuad;
}

// The key of an expert, of the warp's.
template <int kPerLane>
__device__ __forceinline__ uint32_t key_of(const uint32_t (&keys)[kPerLane], int expert) {
  uint32_t key = kNobody;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const uint32_t other = __shfl_sync(kAllLanes, keys[i], lane_of(expert));
    if (i == index_of(expert)) key = other;
  }
  return key;
}

}  // namespace bequest::cuda::chain
