// How the sampler chooses a row's next token: three ways, by what the row asks for.
#pragma once

#include "device/launch.cuh"
#include "device/reductions.cuh"
#include "device/vectors.cuh"
#include "ops/cuda/row_edits.cuh"
#include "ops/cuda/sampling.h"
#include "ops/cuda/vocab_draw.cuh"
#include "ops/cuda/vocab_filter.cuh"

namespace bequest::cuda {

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

struct Choice {
  int token;
  bool bad;
};

__device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

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

__device__ inline bool limits_number(const SamplerRow& row, int vocab) {
  return row.top_k > 0 && row.top_k < vocab;
}
__device__ inline bool filters(const SamplerRow& row, int vocab) {
  return row.state == RowState::kDraws &&
         (row.top_p < 1 || row.min_p_offset > -INFINITY || limits_number(row, vocab));
}

// What a thread, or the cluster, has found in a first pass. `broken`: the row holds NaN or +inf.
struct FirstLook {
  float max = -INFINITY;  // of what may be sampled
  bool broken = false;
  float bound = -INFINITY;  // with a short list: no fewer values than it is to have reach this
};

// Of the cluster, from each thread's. By all threads.
__device__ inline FirstLook first_look(RowCluster& logits, const FirstLook& mine, const SamplerRow& row,
                                       int vocab) {
  uint64_t parts[2] = {uint64_t{__reduce_max_sync(kAllLanes, static_cast<unsigned>(mine.broken))} << 32 |
                           __reduce_max_sync(kAllLanes, ordered(mine.max)),
                       0};
  if (limits_number(row, vocab) && row.top_k <= kSortable / 2) {
    // Each CTA has its share of the list, so that all have it down to the lowest of these.
    const int share = static_cast<int>(ceil_div(row.top_k, logits.size()));
    parts[1] = ~uint64_t{value_of_best(logits.shared(), ordered(mine.max), share)};
  }
  logits.combine(parts, larger);
  return {from_ordered(static_cast<uint32_t>(parts[0])), parts[0] >> 32 != 0,
          parts[1] == 0 ? -INFINITY : from_ordered(static_cast<uint32_t>(~parts[1]))};
}

// What the choices beyond streaming need besides the row.
struct FilterMemory {
  SearchMemory search;
  unsigned turn = 0;  // of the lists in rank 0
};

template <class Row>
__device__ Choice choose_filtered(RowCluster& logits, const Row& tokens, FilterMemory& memory,
                                  const FirstLook& mine, const SamplerRow& row, const RowDrawKey& key,
                                  int vocab) {
  const FirstLook look = first_look(logits, mine, row, vocab);
  if (look.broken || !(look.max > -INFINITY && look.max < INFINITY)) return {0, true};
  return {Filter<Row>(logits, tokens, memory.search, memory.turn, row, look.max, key).draw(vocab, look.bound),
          false};
}

// A row with filters and no edits, read anew by each pass.
template <class T>
__device__ Choice choose_read(RowCluster& logits, const Input<T>& in, FilterMemory& memory,
                              const SamplerRow& row, int vocab) {
  FirstLook mine;
  const ReadRow<T> tokens{logits, in.logits, in.aligned, in.mask};
  logits.for_each_packed<8 / sizeof(T), false>(
      in.logits, in.aligned,
      [&](float (&x)[kUnit], int unit) {
#pragma unroll
        for (int i = 0; i < kUnit; ++i) mine.broken |= !(x[i] < INFINITY);
        if (in.mask) tokens.apply_mask(x, logits.begin() + unit * kUnit);
#pragma unroll
        for (int i = 0; i < kUnit; ++i) mine.max = fmaxf(mine.max, x[i]);
      },
      [] {});
  return choose_filtered(logits, tokens, memory, mine, row, in.key, vocab);
}

// Logits into the slice, without those that the row or the step's mask does not allow; what this thread has
// seen of them.
template <class T>
__device__ FirstLook stage(RowCluster& logits, const Input<T>& in, const SamplerRow& row) {
  const auto* allowed =
      row.allowed >= 0 ? reinterpret_cast<const uint8_t*>(row.storage + row.allowed) : nullptr;
  FirstLook mine;
  const auto keep = [&](float (&x)[kUnit], int unit) {
    const int first = logits.begin() + unit * kUnit;
    unsigned mask = row.rule ? 0 : allowed ? allowed[first / kUnit] : 0xffu;
    if (in.mask) mask &= in.mask[first / kUnit];
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      mine.broken |= !(x[i] < INFINITY);
      if ((mask >> i & 1) == 0) x[i] = -INFINITY;
      mine.max = fmaxf(mine.max, x[i]);
    }
    logits.store_unit(unit, x);
  };
  logits.for_each_loaded(in.logits, in.aligned, keep, [] {});
  return mine;
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

// The first of the best of what the slice holds.
__device__ inline Choice choose_best(RowCluster& logits, bool broken) {
  uint64_t best = 0;
  HeldRow{logits}.for_each_unit(
      [&](const float (&x)[kUnit], int first) {
#pragma unroll
        for (int i = 0; i < kUnit; ++i) {
          broken |= !(x[i] < INFINITY);
          best = larger(best, ranked(x[i], first + i));
        }
      },
      [] {});
  uint64_t parts[2] = {warp_reduce(best, larger),
                       __reduce_max_sync(kAllLanes, static_cast<unsigned>(broken))};
  logits.combine(parts, larger);
  return {ranked_id(parts[0]), parts[1] != 0 || ranked_value(parts[0]) == -INFINITY};
}

// Any row, staged in shared memory and edited there.
template <class T>
__device__ Choice choose_staged(RowCluster& logits, const Input<T>& in, FilterMemory& memory,
                                const SamplerRow& row, int vocab) {
  FirstLook mine = stage(logits, in, row);
  __syncthreads();
  if (edits(row)) {
    if (row.rule != nullptr) admit_next_of_item(logits, in.logits, row);
    edit(logits, row);
  }
  if (row.state == RowState::kGreedy) return choose_best(logits, mine.broken);
  if (edits(row)) {
    mine.max = -INFINITY;
    HeldRow{logits}.for_each_unit(
        [&](const float (&x)[kUnit], int) {
#pragma unroll
          for (int i = 0; i < kUnit; ++i) {
            mine.broken |= !(x[i] < INFINITY);
            mine.max = fmaxf(mine.max, x[i]);
          }
        },
        [] {});
  }
  return choose_filtered(logits, HeldRow{logits}, memory, mine, row, in.key, vocab);
}

}  // namespace bequest::cuda
