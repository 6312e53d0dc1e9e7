// Masses of tokens as integers, and their histograms.
//
// A token's weight exp((x - max) / T) is kept as an octave, which is how often it was halved, and an integer.
// Sums of integers do not depend on their order. So a row has the same result however it is divided: few rows
// may be divided among many CTAs, and of many rows each may have one.
#pragma once

#include "device/reductions.cuh"
#include "ops/cuda/vocab_row.cuh"

namespace bequest::cuda {

inline constexpr int kBins = 32;           // of a histogram
inline constexpr int kMassBits = 20;       // a weight of 2^-octave has the mass 2^kMassBits
inline constexpr int kLeastMass = 741000;  // of a token, but for those of the last octave
// Tokens of a CTA: with more the masses of one of 128 columns might not fit in 32 bits.
inline constexpr int kMostCounted = 350000;

// A token's weight. The last octave has all that is smaller as well, with what is left of its mass.
struct Weight {
  int octave;
  uint32_t mass;
};

class Weigher {
 public:
  __device__ Weigher(float max, float inverse_temperature)
      : max_(max), scale_(halvings_of(inverse_temperature)) {}

  // The octave never falls where x falls. Explicit roundings: all kernels have to agree.
  __device__ __forceinline__ Weight operator()(float x) const {
    const float halvings = __fmul_rn(__fsub_rn(x, max_), scale_);
    const float rounded = __fadd_rn(fmaxf(halvings, 1.0f - kBins), kRound);
    float rest;  // 2^-0.5 to 2^0.5
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(rest) : "f"(__fsub_rn(halvings, __fsub_rn(rounded, kRound))));
    // The last bit of 8 is worth 2^-kMassBits.
    return {__float_as_int(kRound) - __float_as_int(rounded),
            __float_as_uint(__fadd_rn(rest, 8.0f)) - __float_as_uint(8.0f)};
  }
  // A little below the lowest value of `octave`.
  __device__ float below(int octave) const {
    if (octave >= kBins - 1) return -FLT_MAX;
    const float distance = (static_cast<float>(octave) + 0.5f) / scale_;
    return fmaxf(max_ - distance - 1e-5f * (distance + fabsf(max_)), -FLT_MAX);
  }
  // A little above the highest value of `octave`.
  __device__ float above(int octave) const {
    if (octave == 0) return max_;
    const float distance = (static_cast<float>(octave) - 0.5f) / scale_;
    return fminf(max_, max_ - distance + 1e-5f * (distance + fabsf(max_)));
  }

 private:
  static constexpr float kRound = 0x1.8p23f;  // whose last bit is worth 1
  static __device__ float halvings_of(float nats) { return __fmul_rn(nats, 1.44269504f); }
  const float max_;
  const float scale_;  // halvings per unit of x
};

// What the CTAs of a cluster exchange while they search.
struct SearchShared {
  uint64_t part[2][kBins];  // of this CTA, used in turn: one is read while the other is written
  uint64_t total[kBins];    // of the cluster
  unsigned collected[2];    // of rank 0: tokens in `sorted`, or more where some did not fit; used in turn
  unsigned listed;          // tokens in this CTA's list, or more
};

// Memory of a CTA that is as large as the launch says.
struct SearchMemory {
  SearchShared& shared;
  uint32_t* table;  // [kBins, columns]
  uint64_t* list;   // [capacity] ranked() tokens
  int columns;      // 128 or 32: threads that add to a bin without waiting for each other
  int capacity;
};

// Sums in bins over the whole cluster.
class Histogram {
 public:
  __device__ Histogram(RowCluster& row, const SearchMemory& memory) : row_(row), memory_(memory) {}

  // By all threads, before the first add. A barrier is in it.
  __device__ void clear() {
    auto* table = reinterpret_cast<uint4*>(memory_.table);
    for (int i = threadIdx.x; i < kBins * memory_.columns / 4; i += kRowThreads) table[i] = uint4{};
    __syncthreads();
  }
  __device__ __forceinline__ void add(int bin, uint32_t mass) {
    atomicAdd(&memory_.table[bin * memory_.columns + (threadIdx.x & (memory_.columns - 1))], mass);
  }
  // The sum of bin `lane` over the cluster, in every warp. By all threads.
  __device__ uint64_t sum() {
    SearchShared& shared = memory_.shared;
    const int lane = threadIdx.x % kWarp;
    __syncthreads();
    for (int bin = threadIdx.x / kWarp; bin < kBins; bin += kRowWarps) {
      uint64_t sum = 0;
      for (int i = lane; i < memory_.columns; i += kWarp) sum += memory_.table[bin * memory_.columns + i];
      sum = warp_reduce(sum, [](uint64_t a, uint64_t b) { return a + b; });
      if (lane == 0) shared.part[turn_][bin] = sum;
    }
    row_.sync();
    uint64_t* part = &shared.part[turn_][lane];
    turn_ ^= 1;
    if (row_.size() == 1) return *part;
    if (threadIdx.x < kBins) {
      uint64_t of_ranks[kClusterSize];
#pragma unroll
      for (int rank = 0; rank < kClusterSize; ++rank)
        of_ranks[rank] = rank < row_.size() ? *row_.of_rank(part, rank) : 0;
      uint64_t total = 0;
#pragma unroll
      for (const uint64_t sum : of_ranks) total += sum;
      shared.total[lane] = total;
    }
    __syncthreads();
    return shared.total[lane];
  }

 private:
  RowCluster& row_;
  const SearchMemory& memory_;
  int turn_ = 0;
};

// The sum over the lanes up to this one.
template <class V>
__device__ __forceinline__ V lanes_until(V v) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const V before = __shfl_up_sync(kAllLanes, v, distance);
    if (lane >= distance) v += before;
  }
  return v;
}

// A value of some thread that `wanted` threads or a few more of this CTA reach with `mine`. By all threads.
__device__ inline uint32_t value_of_best(ClusterShared& shared, uint32_t mine, int wanted) {
  const unsigned lane = threadIdx.x % kWarp;
  uint32_t low = __reduce_min_sync(kAllLanes, mine), high = __reduce_max_sync(kAllLanes, mine);
  if (lane == 0) shared.warp_part[threadIdx.x / kWarp][0] = uint64_t{low} << 32 | high;
  __syncthreads();
  const uint64_t part = shared.warp_part[lane % kRowWarps][0];
  low = __reduce_min_sync(kAllLanes, static_cast<uint32_t>(part >> 32));
  high = __reduce_max_sync(kAllLanes, static_cast<uint32_t>(part));
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2 + 1;
    const int reached = __syncthreads_count(mine >= middle);
    if (reached < wanted) {
      high = middle - 1;
    } else {
      low = middle;
      if (reached <= wanted + wanted / 8 + 1) break;
    }
  }
  __syncthreads();  // the parts are not read any more
  return low;
}

}  // namespace bequest::cuda
