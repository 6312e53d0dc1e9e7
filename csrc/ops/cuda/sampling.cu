// A cluster per row. Greedy rows and rows with a temperature alone stream their logits once, from device
// memory into registers; the others stage them in shared memory, edit them there, and search where the kept
// tokens end. Each kind has a kernel of its own: instructions come from far behind a product that has read
// all of the L2 anew, and the first one is small enough to begin beside that product.
#include <algorithm>

#include "device/cluster.cuh"
#include "device/launch.cuh"
#include "device/reductions.cuh"
#include "device/vectors.cuh"
#include "ops/cuda/row_edits.cuh"
#include "ops/cuda/sampling.h"
#include "ops/cuda/vocab_draw.cuh"
#include "ops/cuda/vocab_select.cuh"

namespace bequest::cuda {
namespace {

template <class T>
struct Input {
  const T* logits;  // [V]
  bool aligned;
  RowDrawKey key;
  const uint8_t* mask;  // the step's, a bit for each token; null: none

  __device__ Input(const SampleParams& p, int64_t item, const SamplerRow& row)
      : logits(static_cast<const T*>(p.logits) + item * p.stride),
        aligned(p.stride % kVectorWidth<T> == 0 && reinterpret_cast<uintptr_t>(p.logits) % 16 == 0),
        key{row.seed, static_cast<uint32_t>(p.positions[item]), row.choice},
        mask(p.masks ? reinterpret_cast<const uint8_t*>(p.masks + item * ceil_div(p.vocab_size, 32))
                     : nullptr) {}
};

// Logits into the slice, without those that the row or the step's mask does not allow; the range of what was
// read, of this thread's part.
template <class T>
__device__ RowRange stage(RowCluster& logits, const Input<T>& in, const SamplerRow& row) {
  const auto* allowed =
      row.allowed >= 0 ? reinterpret_cast<const uint8_t*>(row.storage + row.allowed) : nullptr;
  RowRange range;
  const auto keep = [&](float (&x)[kUnit], int unit) {
    const int first = logits.begin() + unit * kUnit;
    unsigned mask = row.rule ? 0 : allowed ? allowed[first / kUnit] : 0xffu;
    if (in.mask) mask &= in.mask[first / kUnit];
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      if (first + i < logits.end()) range.add(x[i]);
      if ((mask >> i & 1) == 0) x[i] = -INFINITY;
    }
    logits.store_unit(unit, x);
  };
  logits.for_each_loaded(in.logits, in.aligned, keep, [] {});
  __syncthreads();
  return range;
}

// Puts back what may follow the row's node; nothing else is in the slice. REQUIRES: the row has a catalogue.
template <class T>
__device__ void admit_next_of_item(RowCluster& logits, const T* from, const SamplerRow& row) {
  const CatalogueRule rule = *row.rule;
  const CatalogueView& tree = rule.tree;
  if (!tree.contains(row.node)) return;
  const auto* allowed = row.allowed >= 0 ? row.storage + row.allowed : nullptr;
  const auto admit = [&](int token) {
    float* x = logits.find(token);
    if (x && (!allowed || (allowed[token / 32] >> (token % 32) & 1)))
      *x = __fadd_rn(widen(from[token]), 0.0f);
  };
  const int end = tree.end(row.node);
  for (int i = tree.begin(row.node) + threadIdx.x; i < end; i += kRowThreads) admit(tree.tokens[i]);
  if (!tree.is_terminal(row.node)) return;
  for (int i = threadIdx.x; i < rule.num_ends; i += kRowThreads) admit(rule.end_tokens[i]);
}

// --- the choice
// ------------------------------------------------------------------------------------------------

struct Choice {
  int token;
  bool bad;
};

__device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

// The first of the best. `best` of this thread.
__device__ int all_best(RowCluster& logits, uint64_t best) {
  return ranked_id(logits.all_reduce(best, larger));
}

// No edits and no filters, but for the step's mask: one pass over the logits in device memory.
// Few loads of a draw are on their way at once: each is a copy of its code.
template <class T, bool kDraws, bool kMasked>
__device__ Choice choose_streaming(RowCluster& logits, const Input<T>& in, const SamplerRow& row) {
  float max = -INFINITY;
  bool broken = false;
  uint64_t best = 0;
  Draw draw(logits.shared(), row.inverse_temperature, in.key);
  if constexpr (kDraws) draw.start();
  const RowCutoff everything{-INFINITY, INT_MAX};
  const auto offer = [&](float (&x)[kUnit], int unit) {
    const int first = logits.begin() + unit * kUnit;
    const unsigned allowed = kMasked ? in.mask[first / kUnit] : 0xffu;
    float most = -INFINITY;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      broken |= !(x[i] < INFINITY);
      if (kMasked && (allowed >> i & 1) == 0) x[i] = -INFINITY;
      most = fmaxf(most, x[i]);
    }
    if constexpr (kDraws) {
      draw.offer(x, first, everything);
    } else if (most > max) {
#pragma unroll
      for (int i = kUnit - 1; i >= 0; --i)
        if (x[i] == most) best = ranked(most, first + i);
    }
    max = fmaxf(max, most);
  };
  logits.for_each_loaded<kDraws ? 2 : 4>(in.logits, in.aligned, offer, [&] {
    if constexpr (kDraws) draw.publish();
  });
  uint64_t parts[2] = {warp_reduce(kDraws ? draw.best() : best, larger),
                       uint64_t{__reduce_max_sync(kAllLanes, static_cast<unsigned>(broken))} << 32 |
                           __reduce_max_sync(kAllLanes, ordered(max))};
  logits.find_largest(parts);
  const float row_max = from_ordered(static_cast<uint32_t>(parts[1]));
  return {ranked_id(parts[0]), parts[1] >> 32 != 0 || row_max == -INFINITY};
}

__device__ bool limits_number(const SamplerRow& row, int vocab) { return row.top_k > 0 && row.top_k < vocab; }

__device__ RowCutoff min_p_cutoff(const SamplerRow& row, const RowRange& range, int vocab) {
  if (row.min_p_offset == -INFINITY) return RowCutoff::all(vocab);
  return {__fadd_rn(range.max, row.min_p_offset), INT_MAX};
}

// top_k and top_p on the `n` best tokens, sorted in this CTA, and the draw among what they leave.
__device__ int draw_from_sorted(ClusterShared& shared, const SamplerRow& row, float max,
                                const RowDrawKey& key, int n) {
  n = min(n, row.top_k);
  constexpr int kEach = kSortable / kRowThreads;
  const int first = threadIdx.x * kEach;
  const auto value = [&](int i) { return ranked_value(shared.sorted[i]); };
  const auto weight = [&](int i) {
    return static_cast<double>(weight_of(value(i), max, row.inverse_temperature));
  };
  int last = n;  // tokens before it are kept
  if (row.top_p < 1) {
    double mine = 0;
    for (int i = first; i < min(first + kEach, n); ++i) mine += weight(i);
    auto* parts = reinterpret_cast<double*>(shared.warp_part);
    double before = block_exclusive_sum(mine, parts);
    if (threadIdx.x == kRowThreads - 1) parts[0] = before + mine;
    __syncthreads();
    const double target = row.top_p * parts[0];
    for (int i = first; i < min(first + kEach, n); ++i) {
      if (i > 0 && before >= target) last = min(last, i);
      before += weight(i);
    }
    __syncthreads();
    last =
        block_reduce(last, reinterpret_cast<int*>(shared.warp_part), [](int a, int b) { return min(a, b); });
  }
  uint64_t best = 0;
  for (int i = threadIdx.x; i < last; i += kRowThreads) {
    const int id = ranked_id(shared.sorted[i]);
    best = larger(best, ranked(score_of(value(i), id, row.inverse_temperature, key), id));
  }
  __syncthreads();
  return ranked_id(block_reduce(best, reinterpret_cast<uint64_t*>(shared.total), larger));
}

// Where the tokens end that min_p, top_k and top_p leave. `range` of the edited row.
__device__ RowCutoff find_kept(RowCluster& logits, const SamplerRow& row, const RowRange& range, int vocab) {
  RowCutoff kept = min_p_cutoff(row, range, vocab);
  if (limits_number(row, vocab))
    kept = CutoffSearch<false>(logits, range, row.inverse_temperature, kept, row.top_k).run(vocab);
  if (row.top_p < 1) {
    float mine = 0;
    logits.for_each_unit([&](const float (&x)[kUnit], int first) {
#pragma unroll
      for (int i = 0; i < kUnit; ++i)
        if (kept.keeps(x[i], first + i)) mine += weight_of(x[i], range.max, row.inverse_temperature);
    });
    const double total =
        logits.all_reduce(static_cast<double>(mine), [](double a, double b) { return a + b; });
    kept = CutoffSearch<true>(logits, range, row.inverse_temperature, kept, row.top_p * total).run(vocab);
  }
  return kept;
}

template <class T>
__device__ Choice choose_staged(RowCluster& logits, const Input<T>& in, const SamplerRow& row, int vocab) {
  RowRange mine = stage(logits, in, row);
  if (in.mask || edits(row)) {
    if (!logits.all_reduce(mine).finite()) return {0, true};
    if (row.rule != nullptr) admit_next_of_item(logits, in.logits, row);
    edit(logits, row);
    mine = logits.scan();
  }
  const RowRange range = logits.all_reduce(mine);
  if (!range.finite()) return {0, true};

  if (row.state == RowState::kGreedy) {
    uint64_t best = 0;
    logits.for_each_unit([&](const float (&x)[kUnit], int first) {
#pragma unroll
      for (int i = kUnit - 1; i >= 0; --i)
        if (x[i] == range.max) best = larger(best, ranked(x[i], first + i));
    });
    return {all_best(logits, best), false};
  }
  if (limits_number(row, vocab) && row.top_k <= kSortable / 2) {
    CutoffSearch<false> search(logits, range, row.inverse_temperature, min_p_cutoff(row, range, vocab),
                               row.top_k);
    const int n = search.try_sort_head(vocab);
    // Only rank 0 has it, and only rank 0 needs it.
    if (n > 0)
      return {logits.leads() ? draw_from_sorted(logits.shared(), row, range.max, in.key, n) : 0, false};
  }
  const RowCutoff kept = find_kept(logits, row, range, vocab);
  Draw draw(logits.shared(), row.inverse_temperature, in.key);
  draw.start();
  for (unsigned base = 0; base < logits.units(); base += kRowThreads) {
    const unsigned unit = base + threadIdx.x;
    if (unit < logits.units()) {
      float x[kUnit];
      logits.load_unit(unit, x);
      draw.offer(x, logits.begin() + unit * kUnit, kept);
    }
    draw.publish();
  }
  return {all_best(logits, draw.best()), false};
}

// --- the row's memory
// ------------------------------------------------------------------------------------------

// What a CTA has of its row in shared memory: in registers it would crowd out the logits.
struct RowMemory {
  SamplerRow row;   // a copy
  HostTokens told;  // of thread 0
};

// By the whole CTA.
__device__ void copy_row(const SamplerRow& from, SamplerRow& to) {
  constexpr int kWords = sizeof(SamplerRow) / sizeof(uint32_t);
  if (threadIdx.x < kWords)
    reinterpret_cast<uint32_t*>(&to)[threadIdx.x] = reinterpret_cast<const uint32_t*>(&from)[threadIdx.x];
  __syncthreads();
}

__device__ void ask_whom_to_tell(const SampleParams& p, HostTokens& told) {
  if (threadIdx.x == 0) told = p.told != nullptr ? *p.told : HostTokens{};
}

// By one CTA, after every other has read the row. `row`: its copy
__device__ void record(ClusterShared& shared, const SamplerRow& row, SamplerRow& to, int32_t& last_token,
                       int token) {
  auto* counts = reinterpret_cast<int2*>(row.storage + row.counts);
  const int num_counts = row.num_counts;
  if (row.counts_capacity > 0) {
    if (threadIdx.x == 0) shared.found = -1;
    __syncthreads();
    for (int i = threadIdx.x; i < num_counts; i += blockDim.x)
      if (counts[i].x == token) shared.found = i;
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  if (row.counts_capacity > 0) {
    if (shared.found >= 0) {
      ++counts[shared.found].y;
    } else if (num_counts < row.counts_capacity) {
      counts[num_counts] = {token, 1};
      to.num_counts = num_counts + 1;
    }
  }
  if (row.tail_capacity > 0) {
    int32_t* tail = row.storage + row.tail;
    if (row.tail_len == row.tail_capacity) {
      for (int i = 1; i < row.tail_capacity; ++i) tail[i - 1] = tail[i];
      tail[row.tail_capacity - 1] = token;
    } else {
      tail[row.tail_len] = token;
      to.tail_len = row.tail_len + 1;
    }
  }
  if (row.rule != nullptr && row.node >= 0) to.node = row.rule->tree.child(row.node, token);
  to.num_outputs = row.num_outputs + 1;
  last_token = token;
}

// By thread 0.
__device__ void store(const SampleParams& p, const HostTokens& told, int64_t item, int token, bool bad) {
  p.tokens[item] = token;
  p.bad[item] = bad;
  if (told.tokens == nullptr) return;
  told.tokens[item] = token;
  told.bad[item] = bad;
  if (item == 0 && told.num_read != nullptr) *told.num_read = *told.read;
}

// What both kernels do after the choice, which rank 0 has. REQUIRES: all CTAs of the cluster have read the
// row, and none reads what is another's.
__device__ void finish(const SampleParams& p, RowCluster& logits, const RowMemory& memory, int64_t item,
                       const Choice& choice) {
  if (!logits.leads()) return;
  const int row_id = p.row_ids[item];
  if (!choice.bad && !p.guesses)
    record(logits.shared(), memory.row, p.rows[row_id], p.last_tokens[row_id], choice.token);
  if (threadIdx.x == 0) {
    if (!choice.bad && p.guesses) p.last_tokens[row_id] = choice.token;
    store(p, memory.told, item, choice.bad ? 0 : choice.token, choice.bad);
  }
}

__device__ bool exists(const SampleParams& p, int row_id) { return row_id >= 0 && row_id < p.num_rows; }

__device__ bool needs_staging(const SamplerRow& row, int vocab) {
  return edits(row) || (row.state == RowState::kDraws &&
                        (row.top_p < 1 || row.min_p_offset > -INFINITY || limits_number(row, vocab)));
}

// Where tokens were drafted a row is sampled several times: its samples are a run, which one cluster takes.
// kRuns: there may be such rows. A loop around the choice takes registers, so the others have their own code.
template <bool kRuns>
__device__ bool begins_run(const SampleParams& p, int64_t item) {
  return !kRuns || item == 0 || p.row_ids[item - 1] != p.row_ids[item];
}

__device__ int end_of_run(const SampleParams& p, int first) {
  int end = first + 1;
  while (end < p.num && p.row_ids[end] == p.row_ids[first]) ++end;
  return end;
}

// Samples of the run that begins with `first`, one behind the other: each sees what those before it have left
// in the row. A sample that is not what was drafted is the last. choose(item): by the row's copy, which is
// there; behind it is what finish() requires.
template <bool kRuns, class F>
__device__ void sample_run(const SampleParams& p, RowCluster& logits, int first, RowMemory& memory,
                           F&& choose) {
  if constexpr (!kRuns) return finish(p, logits, memory, first, choose(first));
  int item = first;
  const int end = end_of_run(p, first);
  for (bool right = true; right && item < end; ++item) {
    if (item > first) copy_row(p.rows[p.row_ids[first]], memory.row);
    finish(p, logits, memory, item, choose(item));
    if (item + 1 == end) return;
    logits.sync();  // all see the row and the token as the leader has left them
    right = !p.bad[item] && p.tokens[item] == p.drafts[item];
  }
  if (!logits.leads() || threadIdx.x != 0) return;
  for (; item < end; ++item) store(p, memory.told, item, 0, false);
}

// The run that begins with `first`, in a slice of shared memory.
template <class T, bool kRuns>
__device__ void sample_staged(const SampleParams& p, RowCluster& logits, int64_t first, RowMemory& memory) {
  sample_run<kRuns>(p, logits, static_cast<int>(first), memory, [&](int i) {
    const Choice choice =
        choose_staged(logits, Input<T>(p, i, memory.row), memory.row, static_cast<int>(p.vocab_size));
    logits.sync();
    return choice;
  });
}

// The rows that need no staging, and those that are not open. `early`: rows and the step's arrays are what
// they were before the kernel ahead began.
template <class T, bool kMasked, bool kRuns>
__global__ void __launch_bounds__(kRowThreads, 2) stream_kernel(const SampleParams p, bool early) {
  __shared__ ClusterShared shared;
  __shared__ RowMemory memory;
  let_next_start();
  arrive_in_cluster();
  if (!early) wait_for_previous();
  const int vocab = static_cast<int>(p.vocab_size);
  RowCluster logits(shared, nullptr, vocab);
  const int64_t item = blockIdx.x / logits.size();
  ask_whom_to_tell(p, memory.told);
  const int row_id = p.row_ids[item];
  const SamplerRow& row = memory.row;
  if (exists(p, row_id)) copy_row(p.rows[row_id], memory.row);
  if (early) wait_for_previous();
  await_cluster();  // all have begun
  if (!exists(p, row_id) || row.state == RowState::kClosed) {
    if (logits.leads() && threadIdx.x == 0) store(p, memory.told, item, 0, row_id >= 0);
    return;
  }
  if (!begins_run<kRuns>(p, item) || needs_staging(row, vocab)) return;
  sample_run<kRuns>(p, logits, static_cast<int>(item), memory, [&](int i) {
    const Input<T> in(p, i, row);
    if (row.state == RowState::kGreedy) [[likely]]
      return choose_streaming<T, false, kMasked>(logits, in, row);
    return choose_streaming<T, true, kMasked>(logits, in, row);
  });
}

template <bool kRuns>
__device__ bool is_staged(const SampleParams& p, int64_t item) {
  const int row_id = p.row_ids[item];
  if (!exists(p, row_id) || !begins_run<kRuns>(p, item)) return false;
  const SamplerRow& row = p.rows[row_id];
  return row.state != RowState::kClosed && needs_staging(row, static_cast<int>(p.vocab_size));
}

// The rows that need staging, taken in turn by as many clusters as fit on the device: a batch without such
// rows costs a look at each. Runs after stream_kernel: a row that did not need staging does not need it one
// token later either, but the last token that is held back moves a row from here to there. The rest of its
// run stays here, where the same token is chosen. `early`: as above; stream_kernel changes no row of these.
// kFew: a multiprocessor has one CTA, which may have all registers.
template <class T, bool kRuns, bool kFew>
__global__ void __launch_bounds__(kRowThreads, kFew ? 1 : 2) stage_kernel(const SampleParams p, bool early) {
  extern __shared__ float4 slice[];
  __shared__ ClusterShared shared;
  __shared__ RowMemory memory;
  let_next_start();
  if (!early) wait_for_previous();
  RowCluster logits(shared, reinterpret_cast<float*>(slice), static_cast<int>(p.vocab_size));
  const int64_t first = blockIdx.x / kClusterSize, stride = gridDim.x / kClusterSize;
  int64_t item = first;
  while (item < p.num && !is_staged<kRuns>(p, item)) item += stride;
  if (early) wait_for_previous();
  if (item >= p.num) return;
  ask_whom_to_tell(p, memory.told);
  for (; item < p.num; item += stride) {
    if (!is_staged<kRuns>(p, item)) continue;
    __syncthreads();  // the copy of the row before is not read any more
    copy_row(p.rows[p.row_ids[item]], memory.row);
    sample_staged<T, kRuns>(p, logits, item, memory);
  }
}

__global__ void update_rows_kernel(const RowUpdateParams p) {
  const RowUpdate& update = p.updates[blockIdx.x];
  if (threadIdx.x == 0) {
    p.rows[update.row] = update.state;
    p.last_tokens[update.row] = update.last_token;
  }
  for (int i = threadIdx.x; i < update.payload_len; i += blockDim.x)
    update.state.storage[i] = p.payload[update.payload_begin + i];
}

LaunchShape shape_of(unsigned clusters, unsigned size, size_t bytes) {
  return {.grid = clusters * size,
          .block = kRowThreads,
          .shared_bytes = bytes,
          .cluster = size,
          .overlaps_previous = true};
}

// CTAs of the largest cluster that this device has room for.
template <class Kernel>
unsigned most_ranks(Kernel kernel) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  return clusters_at_once(kernel, shape_of(1, kMostRanks, 0)) > 0 ? kMostRanks : kClusterSize;
}

// Of the device that clusters are sized for.
constexpr int64_t kMultiprocessors = 132;

template <class T, bool kMasked, bool kRuns>
void launch_streaming(const SampleParams& p, bool early, Stream stream) {
  const auto kernel = stream_kernel<T, kMasked, kRuns>;
  static const unsigned most = most_ranks(kernel);
  unsigned size = most;  // about a CTA for each multiprocessor, however many rows there are
  while (size > 1 && p.num * size > kMultiprocessors) size /= 2;
  launch(kernel, shape_of(static_cast<unsigned>(p.num), size, 0), stream, p, early);
}

template <class T, bool kRuns>
void launch_sampling(const SampleParams& p, Stream stream) {
  const bool early = is_captured(stream) && !p.guesses;
  p.masks ? launch_streaming<T, true, kRuns>(p, early, stream)
          : launch_streaming<T, false, kRuns>(p, early, stream);
  constexpr int64_t kStagedClusters = 32;
  const auto kernel =
      p.num * kClusterSize <= kMultiprocessors ? stage_kernel<T, kRuns, true> : stage_kernel<T, kRuns, false>;
  const size_t slice_bytes = slice_size(static_cast<int>(p.vocab_size), kClusterSize) * sizeof(float);
  const auto clusters = static_cast<unsigned>(std::min(p.num, kStagedClusters));
  launch(kernel, shape_of(clusters, kClusterSize, slice_bytes), stream, p, early);
}

}  // namespace

void update_rows(const RowUpdateParams& p, Stream stream) {
  launch(update_rows_kernel, {static_cast<unsigned>(p.num_updates), 128}, stream, p);
}

void sample(const SampleParams& p, Stream stream) {
  check(p.vocab_size >= 1 && p.vocab_size <= kMaxVocab, "sample: vocabulary outside [1, 416000]");
  check(p.stride >= p.vocab_size || p.num <= 1, "sample: rows overlap");
  check(!p.guesses || !p.drafts, "sample: a guess is of one token");
  dispatch(p.dtype, [&]<class T>() {
    p.drafts ? launch_sampling<T, true>(p, stream) : launch_sampling<T, false>(p, stream);
  });
}

}  // namespace bequest::cuda
