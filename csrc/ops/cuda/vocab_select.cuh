// Where the best tokens of a row in shared memory end: so many of the largest logits (equal ones by lower
// id), found without sorting the row.
//
// A bracket of values is narrowed: one pass measures kLevels values inside it and keeps the part in which the
// target is reached. Levels are spaced evenly by value and, in every second pass, by the integers that floats
// are, so that no distribution needs more than kMaxPasses; two or three are usual. Once few tokens are
// left in the bracket they are sorted; if they are all equal, their ids are counted.
#pragma once

#include "device/launch.cuh"
#include "device/reductions.cuh"
#include "ops/cuda/vocab_row.cuh"

namespace bequest::cuda {

inline constexpr int kLevels = 8;
inline constexpr int kMaxPasses = 24;

// exp((x - max) / T); the argument's error stays under 1e-5 where the weight matters.
__device__ __forceinline__ float weight_of(float x, float max, float inverse_temperature) {
  return __expf((x - max) * inverse_temperature);
}

// Descending over `sorted` [n], n <= kSortable, by one CTA. What is behind n is overwritten.
__device__ inline void sort_descending(uint64_t* sorted, int n) {
  int size = 2;
  while (size < n) size *= 2;
  for (int i = threadIdx.x + n; i < size; i += kRowThreads) sorted[i] = 0;
  __syncthreads();
  for (int run = 2; run <= size; run *= 2) {
    for (int distance = run / 2; distance > 0; distance /= 2) {
      for (int pair = threadIdx.x; pair < size / 2; pair += kRowThreads) {
        const int low = 2 * pair - (pair & (distance - 1));
        const uint64_t a = sorted[low];
        const uint64_t b = sorted[low + distance];
        if ((a < b) == ((low & run) == 0)) {
          sorted[low] = b;
          sorted[low + distance] = a;
        }
      }
      __syncthreads();
    }
  }
}

// The sum over the threads before this one. `shared` holds one element per warp.
template <class V>
__device__ V block_exclusive_sum(V v, V* shared) {
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  V sum = v;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const V before = __shfl_up_sync(kAllLanes, sum, distance);
    if (lane >= distance) sum += before;
  }
  if (lane == kWarp - 1) shared[warp] = sum;
  __syncthreads();
  V before = 0;
  for (int w = 0; w < warp; ++w) before += shared[w];
  __syncthreads();
  return before + sum - v;
}

// Tokens of [lower, upper) that `kept` keeps, as ranked() keys in rank 0's `sorted`, in no order; their
// number.
__device__ inline int collect(RowCluster& row, RowCutoff kept, float lower, float upper) {
  ClusterShared& shared = row.shared();
  if (row.leads() && threadIdx.x == 0) shared.num_collected = 0;
  row.sync();
  unsigned* count = row.of_rank(&shared.num_collected, 0);
  uint64_t* sorted = row.of_rank(shared.sorted, 0);
  row.for_each_unit([&](const float (&x)[kUnit], int first) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      if (!(x[i] >= lower && x[i] < upper && kept.keeps(x[i], first + i))) continue;
      const unsigned at = atomicAdd(count, 1u);
      if (at < kSortable) sorted[at] = ranked(x[i], first + i);
    }
  });
  row.sync();
  return min(static_cast<int>(*count), kSortable);
}

class CutoffSearch {
 public:
  // For the `target` best of what `kept` keeps. `range` of the row
  __device__ CutoffSearch(RowCluster& row, const RowRange& range, RowCutoff kept, int target)
      : row_(row),
        kept_(kept),
        target_(target),
        lower_(fmaxf(kept.value, range.min)),
        upper_(from_ordered(ordered(range.max) + 1)) {}

  __device__ RowCutoff run(int vocab) {
    int count = vocab;
    for (int pass = 0; count > kSortable && pass < kMaxPasses; ++pass) {
      if (all_equal()) return last_of_equals(count);
      count = narrow(pass % 2 == 0);
    }
    return last_of_sorted();
  }

  // Leaves all tokens down to the cutoff, and a few more, sorted in rank 0, and returns their number; -1 if
  // they are too many, or too many are equal.
  __device__ int try_sort_head(int vocab) {
    int count = vocab;
    for (int pass = 0; count_above_ + count > kSortable; ++pass) {
      if (all_equal() || count_above_ > kSortable || pass == kMaxPasses) return -1;
      count = narrow(pass % 2 == 0);
    }
    const int n = collect(row_, kept_, lower_, INFINITY);
    if (row_.leads()) sort_descending(row_.shared().sorted, n);
    return n;
  }

 private:
  __device__ bool all_equal() const { return ordered(upper_) - ordered(lower_) <= 1; }

  struct Measure {
    uint32_t count[kLevels] = {};
  };

  __device__ void place_levels(bool by_value, float (&level)[kLevels]) const {
    const uint32_t low = ordered(lower_);
    const uint32_t high = ordered(upper_);
    const float step = by_value ? (upper_ - lower_) / kLevels : 0.0f;
#pragma unroll
    for (int i = 0; i < kLevels; ++i) {
      const auto even = static_cast<uint32_t>(high - uint64_t{high - low} * (i + 1) / kLevels);
      const float at = by_value ? upper_ - step * static_cast<float>(i + 1) : from_ordered(even);
      level[i] = fminf(fmaxf(at, lower_), upper_);
    }
    level[kLevels - 1] = lower_;
  }

  __device__ Measure measure(const float (&level)[kLevels]) {
    Measure mine;
    row_.for_each_unit([&](const float (&x)[kUnit], int first) {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        if (!(x[i] >= lower_ && x[i] < upper_ && kept_.keeps(x[i], first + i))) continue;
#pragma unroll
        for (int l = 0; l < kLevels; ++l) mine.count[l] += x[i] >= level[l];
      }
    });
    return mine;
  }

  // Takes the part of the bracket in which the target is reached; returns how many tokens it holds.
  __device__ int narrow(bool by_value) {
    float level[kLevels];
    place_levels(by_value, level);
    const Measure mine = measure(level);
    uint64_t sums[kLevels];
#pragma unroll
    for (int l = 0; l < kLevels; ++l) sums[l] = __reduce_add_sync(kAllLanes, mine.count[l]);
    row_.combine(sums, [](uint64_t a, uint64_t b) { return a + b; });
    int before = 0;
    int count = 0;
#pragma unroll
    for (int l = 0; l < kLevels; ++l) {
      const int reached = static_cast<int>(sums[l]);
      count = reached - before;
      lower_ = level[l];
      if (count_above_ + reached >= target_ || l == kLevels - 1) break;
      upper_ = level[l];
      before = reached;
    }
    count_above_ += before;
    return count;
  }

  // Sorts what is left and walks down to the target.
  __device__ RowCutoff last_of_sorted() {
    ClusterShared& shared = row_.shared();
    const int n = collect(row_, kept_, lower_, upper_);
    if (row_.leads()) {
      sort_descending(shared.sorted, n);
      if (threadIdx.x == 0) {
        const int last = min(max(target_ - count_above_, 1), n) - 1;
        shared.cutoff =
            n > 0 ? RowCutoff{ranked_value(shared.sorted[last]), ranked_id(shared.sorted[last])} : kept_;
      }
    }
    row_.sync();
    return *row_.of_rank(&shared.cutoff, 0);
  }

  // Too many tokens have the value `lower_`: the lowest ids among them, as many as are needed.
  __device__ RowCutoff last_of_equals(int count) {
    const int needed = max(1, target_ - count_above_);
    if (needed >= count) return {lower_, kept_.value == lower_ ? kept_.last_id : INT_MAX};

    ClusterShared& shared = row_.shared();
    const int size = row_.end() - row_.begin();
    const int each_thread = static_cast<int>(ceil_div(max(size, 0), kRowThreads));
    const int first = row_.begin() + threadIdx.x * each_thread;
    const auto counts = [&](int id) { return *row_.find(id) == lower_ && kept_.keeps(lower_, id); };
    int mine = 0;
    for (int id = first; id < min(first + each_thread, row_.end()); ++id) mine += counts(id);
    const int before = block_exclusive_sum(mine, reinterpret_cast<int*>(shared.warp_part));
    if (threadIdx.x == kRowThreads - 1) shared.num_collected = before + mine;
    row_.sync();
    int earlier = before;
    for (int rank = 0; rank < row_.rank(); ++rank)
      earlier += static_cast<int>(*row_.of_rank(&shared.num_collected, rank));
    int nth = needed - earlier;
    if (nth >= 1 && nth <= mine) {
      int id = first;
      while (!(counts(id) && --nth == 0)) ++id;
      *row_.of_rank(&shared.cutoff, 0) = {lower_, id};
    }
    row_.sync();
    return *row_.of_rank(&shared.cutoff, 0);
  }

  RowCluster& row_;
  const RowCutoff kept_;
  const int target_;
  float lower_;  // the cutoff's value is in [lower, upper)
  float upper_;
  int count_above_ = 0;  // of x >= upper
};

}  // namespace bequest::cuda
