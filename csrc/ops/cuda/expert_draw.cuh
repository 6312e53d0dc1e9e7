// The best experts of a token, drawn one after another by a warp that has their scores in registers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/reductions.cuh"

namespace bequest::cuda {

inline constexpr uint32_t kNoScore = 0;  // below the key of every score

// Larger for better scores; NaN is -inf.
__device__ __forceinline__ uint32_t key_of(float score) {
  const uint32_t bits = __float_as_uint(score != score ? -INFINITY : score);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float score_of(uint32_t key) {
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

struct Drawn {
  uint32_t key;
  int place;
};

// The largest key of the warp's lanes is taken out: of equal ones that of the smallest place. `place_of(i)`:
// of this lane's keys, ascending.
template <int kPerLane, class PlaceOf>
__device__ __forceinline__ Drawn draw_best(uint32_t (&keys)[kPerLane], const PlaceOf& place_of) {
  uint32_t best = kNoScore;
  int place = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i)
    if (keys[i] > best) best = keys[i], place = place_of(i);
  const uint32_t top = __reduce_max_sync(kAllLanes, best);
  const auto winner = static_cast<int>(
      __reduce_min_sync(kAllLanes, best == top ? static_cast<unsigned>(place) : 0xffffffffu));
#pragma unroll
  for (int i = 0; i < kPerLane; ++i)
    if (place_of(i) == winner) keys[i] = kNoScore;
  return {top, winner};
}

}  // namespace bequest::cuda
