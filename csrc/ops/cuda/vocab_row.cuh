// A row of logits on a cluster of CTAs. Each CTA holds a slice of the vocabulary in shared memory as float32,
// so that a row is read from device memory once however many passes its selection takes. Cluster and block
// size never depend on the batch: the order of additions, and so a row's result, is always the same.
#pragma once

#include <cooperative_groups.h>

#include <cfloat>
#include <climits>

#include "device/launch.cuh"
#include "device/reductions.cuh"
#include "device/vectors.cuh"

namespace bequest::cuda {

inline constexpr int kClusterSize = 8;  // of rows that are staged
inline constexpr int kMostRanks = 16;   // of rows that stream; some chips have room for 8
inline constexpr int kRowThreads = 512;
inline constexpr int kRowWarps = kRowThreads / kWarp;
inline constexpr int kUnit = 8;           // tokens that a thread handles at once: two philox blocks
inline constexpr int kMaxShared = 24;     // 8-byte words of the largest reduction
inline constexpr int kSortable = 1024;    // candidates that are sorted rather than searched
inline constexpr int kMaxVocab = 416000;  // what fits in the shared memory of a cluster

constexpr int slice_size(int vocab, int cluster_size) {
  return static_cast<int>(round_up(ceil_div(vocab, cluster_size), kUnit));
}

// Kept are x > value, and of x == value those with id <= last_id.
struct RowCutoff {
  float value;
  int last_id;

  // Everything; what pads the last slice is behind last_id.
  static __device__ RowCutoff all(int vocab) { return {-INFINITY, vocab - 1}; }
  __device__ bool keeps(float x, int id) const { return x > value || (x == value && id <= last_id); }
};

// Floats as consecutive unsigned integers of the same order. Subnormal ones count as zero, as fast math takes
// them: the integers have no gap there, so that a search over them always makes progress.
inline constexpr uint32_t kSmallestNormal = 0x00800000u;
__host__ __device__ inline uint32_t ordered_bits(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t steps = magnitude < kSmallestNormal ? 0 : magnitude - (kSmallestNormal - 1);
  return bits >> 31 ? 0x80000000u - steps : 0x80000000u + steps;
}
__host__ __device__ inline uint32_t unordered_bits(uint32_t key) {
  const uint32_t steps = key < 0x80000000u ? 0x80000000u - key : key - 0x80000000u;
  const uint32_t magnitude = steps == 0 ? 0 : steps + (kSmallestNormal - 1);
  return magnitude | (key < 0x80000000u ? 0x80000000u : 0u);
}
__device__ __forceinline__ uint32_t ordered(float x) { return ordered_bits(__float_as_uint(x)); }
__device__ __forceinline__ float from_ordered(uint32_t key) { return __uint_as_float(unordered_bits(key)); }
// Larger first, equal ones by lower id, as one integer.
__device__ __forceinline__ uint64_t ranked(float x, int id) {
  return uint64_t{ordered(x)} << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}
__device__ __forceinline__ float ranked_value(uint64_t key) { return from_ordered(key >> 32); }
__device__ __forceinline__ int ranked_id(uint64_t key) {
  return static_cast<int>(0xffffffffu - static_cast<uint32_t>(key));
}

// What the CTAs of a cluster exchange.
struct ClusterShared {
  uint64_t warp_part[kRowWarps][kMaxShared];
  uint64_t block_part[2][kMaxShared];  // used in turn: one is read while the other is written
  uint64_t total[kMaxShared];
  uint64_t largest[kMostRanks][2];  // of rank 0: what each CTA has found
  uint64_t sorted[kSortable];       // of rank 0
  unsigned num_collected;           // of rank 0
  RowCutoff cutoff;                 // of rank 0
  int crossing;                     // of rank 0: where a walk over `sorted` ends
  uint32_t best_score;              // ordered(): what a draw of this CTA has to beat
  int found;                        // of rank 0: where a token stands in the row's counts
};

// What a row is like. `broken`: it holds a NaN.
struct RowRange {
  float max = -INFINITY;
  float min = INFINITY;  // of what is finite
  bool broken = false;
  bool masked = false;  // holds -inf

  __device__ void add(float x) {
    max = fmaxf(max, x);
    if (x > -INFINITY) min = fminf(min, x);
    broken |= x != x;
    masked |= x == -INFINITY;
  }
  // The row has a softmax.
  __device__ bool finite() const { return !broken && max > -INFINITY && max < INFINITY; }
};

class RowCluster {
 public:
  __device__ RowCluster(ClusterShared& shared, float* slice, int vocab)
      : shared_(shared),
        slice_(slice),
        cluster_(cooperative_groups::this_cluster()),
        size_(static_cast<int>(cluster_.num_blocks())),
        begin_(static_cast<int>(cluster_.block_rank()) * slice_size(vocab, size_)),
        end_(min(vocab, begin_ + slice_size(vocab, size_))),
        units_(end_ > begin_ ? static_cast<unsigned>(ceil_div(end_ - begin_, kUnit)) : 0) {}

  __device__ int rank() const { return static_cast<int>(cluster_.block_rank()); }
  __device__ int size() const { return size_; }
  __device__ bool leads() const { return rank() == 0; }
  __device__ int begin() const { return begin_; }
  __device__ int end() const { return end_; }
  __device__ unsigned units() const { return units_; }
  __device__ ClusterShared& shared() { return shared_; }
  __device__ void sync() {
    if (size_ > 1) {
      cluster_.sync();
    } else {
      __syncthreads();
    }
  }

  // The logit of a token of this slice; null for others.
  __device__ float* find(int id) { return id >= begin_ && id < end_ ? slice_ + (id - begin_) : nullptr; }

  // Tokens begin + unit * kUnit + [0, kUnit) of `row` in device memory; -inf behind the end. -0 becomes +0:
  // the order of integers has to be that of floats.
  template <class T>
  __device__ __forceinline__ void load_unit(const T* row, bool aligned, int unit, float (&x)[kUnit]) const {
    const int first = begin_ + unit * kUnit;
    if (aligned && first + kUnit <= end_) {
      constexpr int kWide = kVectorWidth<T>;
#pragma unroll
      for (int i = 0; i < kUnit; i += kWide)
        load_vector<T, kWide>(row + first + i, reinterpret_cast<float (&)[kWide]>(x[i]));
    } else {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) x[i] = first + i < end_ ? widen(row[first + i]) : -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < kUnit; ++i) x[i] = __fadd_rn(x[i], 0.0f);
  }
  template <class T>
  struct PackedUnit {
    Packed<T, kVectorWidth<T>> part[kUnit / kVectorWidth<T>];
  };
  template <class T>
  __device__ __forceinline__ PackedUnit<T> load_packed_unit(const T* row, bool aligned, int unit) const {
    constexpr int kWide = kVectorWidth<T>;
    const int first = begin_ + unit * kUnit;
    PackedUnit<T> packed;
#pragma unroll
    for (int part = 0; part < kUnit / kWide; ++part) {
      const int at = first + part * kWide;
      if (aligned && first + kUnit <= end_) {
        packed.part[part] = load_packed<T, kWide>(row + at);
      } else {
        float x[kWide];
        for (int i = 0; i < kWide; ++i) x[i] = at + i < end_ ? widen(row[at + i]) : -INFINITY;
        packed.part[part] = pack<T, kWide>(x);
      }
    }
    return packed;
  }
  template <class T>
  static __device__ __forceinline__ void unpack_unit(const PackedUnit<T>& packed, float (&x)[kUnit]) {
    constexpr int kWide = kVectorWidth<T>;
#pragma unroll
    for (int part = 0; part < kUnit / kWide; ++part)
      unpack<T, kWide>(packed.part[part], reinterpret_cast<float (&)[kWide]>(x[part * kWide]));
#pragma unroll
    for (int i = 0; i < kUnit; ++i) x[i] = __fadd_rn(x[i], 0.0f);
  }
  __device__ __forceinline__ void load_unit(int unit, float (&x)[kUnit]) const {
    const auto* from = reinterpret_cast<const float4*>(slice_ + unit * kUnit);
    reinterpret_cast<float4(&)[2]>(x)[0] = from[0];
    reinterpret_cast<float4(&)[2]>(x)[1] = from[1];
  }
  __device__ __forceinline__ void store_unit(int unit, const float (&x)[kUnit]) {
    auto* to = reinterpret_cast<float4*>(slice_ + unit * kUnit);
    to[0] = make_float4(x[0], x[1], x[2], x[3]);
    to[1] = make_float4(x[4], x[5], x[6], x[7]);
  }
  // The range of what the slice holds now, of this thread's part.
  __device__ RowRange scan() const {
    RowRange range;
    for_each_unit([&](const float (&x)[kUnit], int first) {
#pragma unroll
      for (int i = 0; i < kUnit; ++i)
        if (first + i < end_) range.add(x[i]);
    });
    return range;
  }

  // f(x [kUnit], unit) over this thread's part of `row` in device memory, after_unit() by whole warps after
  // each unit. Several loads are on their way before the first is used: there are few threads for the
  // memory's latency.
  template <int kLoads = 4, class T, class F, class G>
  __device__ __forceinline__ void for_each_loaded(const T* row, bool aligned, F&& f, G&& after_unit) const {
    for (unsigned base = threadIdx.x; base - threadIdx.x < units_; base += kLoads * blockDim.x) {
      float x[kLoads][kUnit];
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        if (base + i * blockDim.x < units_) load_unit(row, aligned, base + i * blockDim.x, x[i]);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (base + i * blockDim.x < units_) f(x[i], base + i * blockDim.x);
        after_unit();
      }
    }
  }
  // The same, with units that wait as memory has them. kBackward: from the last unit to the first, so that a
  // pass behind another one begins with what the L2 still has.
  template <int kLoads, bool kBackward, class T, class F, class G>
  __device__ __forceinline__ void for_each_packed(const T* row, bool aligned, F&& f, G&& after_unit) const {
    const auto unit = [&](unsigned i) { return static_cast<int>(kBackward ? units_ - 1 - i : i); };
    for (unsigned base = threadIdx.x; base - threadIdx.x < units_; base += kLoads * kRowThreads) {
      PackedUnit<T> packed[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        if (base + i * kRowThreads < units_)
          packed[i] = load_packed_unit(row, aligned, unit(base + i * kRowThreads));
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (base + i * kRowThreads < units_) {
          float x[kUnit];
          unpack_unit(packed[i], x);
          f(x, unit(base + i * kRowThreads));
        }
        after_unit();
      }
    }
  }
  // f(x [kUnit], id of the first) over this thread's part of the slice.
  template <class F>
  __device__ __forceinline__ void for_each_unit(F&& f) const {
    for (unsigned unit = threadIdx.x; unit < units_; unit += kRowThreads) {
      float x[kUnit];
      load_unit(unit, x);
      f(x, begin_ + unit * kUnit);
    }
  }

  // op over the cluster, elementwise and in a fixed order, in every thread. In: valid in lane 0 of each warp.
  template <class V, int K, class Op>
  __device__ void combine(V (&v)[K], Op op) {
    static_assert(sizeof(V) == 8 && K <= kMaxShared);
    auto& parts = reinterpret_cast<V(&)[kRowWarps][kMaxShared]>(shared_.warp_part);
    auto& block = reinterpret_cast<V(&)[2][kMaxShared]>(shared_.block_part);
    auto& total = reinterpret_cast<V(&)[kMaxShared]>(shared_.total);
    if (threadIdx.x % kWarp == 0) {
#pragma unroll
      for (int k = 0; k < K; ++k) parts[threadIdx.x / kWarp][k] = v[k];
    }
    __syncthreads();
    if (threadIdx.x < K) {
      V sum = parts[0][threadIdx.x];
#pragma unroll
      for (int warp = 1; warp < kRowWarps; ++warp) sum = op(sum, parts[warp][threadIdx.x]);
      block[turn_][threadIdx.x] = sum;
    }
    sync();
    if (threadIdx.x < K) {
      // All are asked for at once: each takes a trip across the cluster.
      V parts_of_ranks[kClusterSize];
#pragma unroll
      for (int rank = 0; rank < kClusterSize; ++rank)
        parts_of_ranks[rank] = *cluster_.map_shared_rank(&block[turn_][threadIdx.x], min(rank, size_ - 1));
      V sum = parts_of_ranks[0];
#pragma unroll
      for (int rank = 1; rank < kClusterSize; ++rank)
        if (rank < size_) sum = op(sum, parts_of_ranks[rank]);
      total[threadIdx.x] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < K; ++k) v[k] = total[k];
    turn_ ^= 1;
  }

  // The largest over the cluster, elementwise, in every thread of rank 0. Behind it no CTA reads what is
  // another's. In: valid in lane 0 of each warp. REQUIRES: all CTAs have begun
  __device__ void find_largest(uint64_t (&v)[2]) {
    const auto larger = [](uint64_t a, uint64_t b) { return a > b ? a : b; };
    const unsigned warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    if (lane == 0) {
      shared_.warp_part[warp][0] = v[0];
      shared_.warp_part[warp][1] = v[1];
    }
    __syncthreads();
    if (warp == 0) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        v[k] = warp_reduce(lane < kRowWarps ? shared_.warp_part[lane][k] : 0, larger);
        if (lane == 0) *cluster_.map_shared_rank(&shared_.largest[rank()][k], 0) = v[k];
      }
    }
    sync();
    if (!leads()) return;
#pragma unroll
    for (int k = 0; k < 2; ++k)
      v[k] = warp_reduce(lane < static_cast<unsigned>(size_) ? shared_.largest[lane][k] : 0, larger);
  }

  template <class V, class Op>
  __device__ V all_reduce(V v, Op op) {
    V parts[1] = {warp_reduce(v, op)};
    combine(parts, op);
    return parts[0];
  }

  __device__ RowRange all_reduce(const RowRange& range) {
    const auto larger = [](uint64_t a, uint64_t b) { return a > b ? a : b; };
    uint64_t parts[4] = {ordered(range.max), ordered(-range.min), range.broken, range.masked};
#pragma unroll
    for (uint64_t& part : parts) part = __reduce_max_sync(kAllLanes, static_cast<uint32_t>(part));
    combine(parts, larger);
    RowRange all;
    all.max = from_ordered(static_cast<uint32_t>(parts[0]));
    all.min = -from_ordered(static_cast<uint32_t>(parts[1]));
    all.broken = parts[2] != 0;
    all.masked = parts[3] != 0;
    return all;
  }

  template <class V>
  __device__ V* of_rank(V* p, int rank) {
    return cluster_.map_shared_rank(p, rank);
  }

 private:
  ClusterShared& shared_;
  float* slice_;  // [slice_size]
  cooperative_groups::cluster_group cluster_;
  const int size_;   // CTAs
  const int begin_;  // tokens [begin, end) are this CTA's
  const int end_;
  const unsigned units_;
  int turn_ = 0;
};

}  // namespace bequest::cuda
