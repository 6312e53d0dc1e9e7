// A cluster per row: logits are read from device memory once, and staged for the passes after the maximum is
// known.
#include <algorithm>

#include "device/launch.cuh"
#include "device/reductions.cuh"
#include "device/vectors.cuh"
#include "ops/cuda/logprobs.h"
#include "ops/cuda/vocab_select.cuh"

namespace bequest::cuda {
namespace {

__device__ void fill_broken(const LogprobParams& p, int64_t item) {
  const float nan = __uint_as_float(0x7fc00000u);
  if (threadIdx.x == 0) {
    p.chosen_logprob[item] = nan;
    p.rank[item] = 1;
  }
  for (int k = threadIdx.x; k < p.top; k += kRowThreads) {
    p.top_ids[item * p.top + k] = 0;
    p.top_logprob[item * p.top + k] = nan;
  }
}

// The K best, from rank 0.
__device__ void write_top(RowCluster& row, const LogprobParams& p, int64_t item, RowRange range,
                          double log_sum) {
  const int vocab = static_cast<int>(p.vocab_size);
  if (range.masked) range.min = -INFINITY;  // masked tokens may be needed to make up the number
  const RowCutoff all = RowCutoff::all(vocab);
  const auto target = static_cast<int>(p.top);
  if (CutoffSearch(row, range, all, target).try_sort_head(vocab) < 0) {
    const RowCutoff kept = CutoffSearch(row, range, all, target).run(vocab);
    const int n = collect(row, kept, -INFINITY, INFINITY);
    if (row.leads()) sort_descending(row.shared().sorted, n);
  }
  if (!row.leads()) return;
  const uint64_t* sorted = row.shared().sorted;
  for (int k = threadIdx.x; k < p.top; k += kRowThreads) {
    p.top_ids[item * p.top + k] = ranked_id(sorted[k]);
    p.top_logprob[item * p.top + k] = static_cast<float>(ranked_value(sorted[k]) - log_sum);
  }
}

template <class T>
__global__ void __launch_bounds__(kRowThreads, 2) logprobs_kernel(const LogprobParams p) {
  extern __shared__ float4 slice[];
  __shared__ ClusterShared shared;
  const int64_t item = blockIdx.x / kClusterSize;
  RowCluster row(shared, reinterpret_cast<float*>(slice), static_cast<int>(p.vocab_size));
  const int chosen = p.chosen[item];
  if (chosen < 0 || chosen >= p.vocab_size) {
    if (row.leads()) fill_broken(p, item);
    return;
  }
  const T* from = static_cast<const T*>(p.logits) + item * p.stride;
  const bool aligned = p.stride % kVectorWidth<T> == 0 && reinterpret_cast<uintptr_t>(p.logits) % 16 == 0;
  const float value = widen(from[chosen]);

  RowRange mine;
  uint32_t greater = 0;
  const auto keep = [&](const float (&x)[kUnit], int unit) {
    row.store_unit(unit, x);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      if (row.begin() + unit * kUnit + i < row.end()) mine.add(x[i]);
      greater += x[i] > value;
    }
  };
  row.for_each_loaded(from, aligned, keep, [] {});
  __syncthreads();
  const RowRange range = row.all_reduce(mine);
  if (!range.finite()) {
    if (row.leads()) fill_broken(p, item);
    row.sync();
    return;
  }
  float mass = 0;
  row.for_each_unit([&](const float (&x)[kUnit], int) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) mass += weight_of(x[i], range.max, 1.0f);
  });
  double sums[2] = {warp_sum(mass), static_cast<double>(__reduce_add_sync(kAllLanes, greater))};
  row.combine(sums, [](double a, double b) { return a + b; });
  const double log_sum = range.max + log(sums[0]);
  if (row.leads() && threadIdx.x == 0) {
    p.chosen_logprob[item] = static_cast<float>(value - log_sum);
    p.rank[item] = 1 + static_cast<int32_t>(sums[1]);
  }
  if (p.top > 0) write_top(row, p, item, range, log_sum);
  row.sync();  // nobody leaves while its shared memory is read
}

}  // namespace

void logprobs(const LogprobParams& p, Stream stream) {
  check(p.vocab_size >= 1 && p.vocab_size <= kMaxVocab, "logprobs: vocabulary outside [1, 416000]");
  check(p.top >= 0 && p.top <= std::min<int64_t>(p.vocab_size, kSortable),
        "logprobs: more alternatives than tokens, or than 1024");
  dispatch(p.dtype, [&]<class T>() {
    const size_t slice_bytes = slice_size(static_cast<int>(p.vocab_size), kClusterSize) * sizeof(float);
    launch(logprobs_kernel<T>,
           {static_cast<unsigned>(p.num * kClusterSize), kRowThreads, slice_bytes, kClusterSize}, stream, p);
  });
}

}  // namespace bequest::cuda
