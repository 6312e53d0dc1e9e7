// The plan of experts' products (expert_plan.h), by one CTA.
//
// A token takes an expert once. So the tokens of an expert are a set, kept as bits: threads set them in any
// order, and the place of a token is the number of bits before its own. Nothing depends on timing.
#pragma once

#include "device/launch.cuh"
#include "device/reductions.cuh"
#include "ops/cuda/expert_plan.h"

namespace bequest::cuda {

inline constexpr int kSortWarps = 32;
inline constexpr int kSortThreads = kSortWarps * kWarp;
static_assert(kSortThreads >= kMostExperts, "a thread has one expert");

inline constexpr int kGroupTokens = 32;   // whose bits are one word
inline constexpr int kSortWords = 16384;  // of bits, at most

// Sums over the experts of each warp's threads.
struct SortShared {
  int rows[kSortWarps];
  int tiles[kSortWarps];
};

// --- runs -----------------------------------------------------------------------------------------------

__device__ __forceinline__ int inclusive_warp_sum(int value) {
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int before = __shfl_up_sync(kAllLanes, value, distance);
    if (static_cast<int>(threadIdx.x) % kWarp >= distance) value += before;
  }
  return value;
}

// Stores the runs, where expert threadIdx.x has `rows` pairs. Its first pair in the order of runs. By the
// whole CTA; experts that do not exist have none.
__device__ __forceinline__ int leave_runs(int rows, const ExpertPlan& plan, SortShared& shared) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, expert = threadIdx.x;
  const int tiles = (rows + plan.tile_rows - 1) / plan.tile_rows;
  const int rows_until = inclusive_warp_sum(rows), tiles_until = inclusive_warp_sum(tiles);
  if (lane == kWarp - 1) shared.rows[warp] = rows_until, shared.tiles[warp] = tiles_until;
  const int used = __syncthreads_count(rows > 0);
  // Of the warps before, each lane has one.
  const int rows_before = __reduce_add_sync(kAllLanes, lane < warp ? shared.rows[lane] : 0);
  const int tiles_before = __reduce_add_sync(kAllLanes, lane < warp ? shared.tiles[lane] : 0);
  const ExpertRun run{expert, rows_before + rows_until - rows, rows, tiles_before + tiles_until - tiles};
  for (int i = 0; i < tiles; ++i) plan.runs[run.first_tile + i] = run;
  if (expert == kSortThreads - 1) *plan.num_tiles = run.first_tile + tiles;
  if (expert == 0 && plan.num_read != nullptr)
    atomicAdd(plan.num_read, static_cast<unsigned long long>(used));
  return run.first;
}

// The bits of tokens before `token` of its group.
__device__ __forceinline__ uint32_t bits_before(int token) { return (1u << token % kGroupTokens) - 1; }

// --- many tokens ----------------------------------------------------------------------------------------

// The choice of all tokens, [T, K] each. What counts NaN is left out: no product makes its row any better.
struct ChosenPairs {
  const int32_t* ids;
  const float* weights;

  // Of a pair; -1: none.
  __device__ __forceinline__ int expert(int pair, int num_experts) const {
    const float weight = __ldcg(weights + pair);
    return weight == weight ? min(max(__ldcg(ids + pair), 0), num_experts - 1) : -1;
  }
};

// Calls visit(pair, expert) for the pairs of [begin, end) that have one, in any order. By the whole CTA.
template <class Visit>
__device__ __forceinline__ void visit_pairs(const ChosenPairs& pairs, int begin, int end, int num_experts,
                                            Visit&& visit) {
  constexpr int kAhead = 8;  // asked for at once
  for (int base = begin + static_cast<int>(threadIdx.x); base < end; base += kAhead * kSortThreads) {
    int experts[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int pair = base + i * kSortThreads;
      experts[i] = pair < end ? pairs.expert(pair, num_experts) : -1;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (experts[i] >= 0) visit(base + i * kSortThreads, experts[i]);
  }
}

// Where things lie in dynamic shared memory: words [groups, E] of bits and the pairs before them, and [E] of
// the places of experts.
struct SortPlaces {
  int groups;  // of tokens that are sorted at a time

  __host__ __device__ SortPlaces(int64_t num_tokens, int64_t num_experts) {
    const int64_t all = (num_tokens + kGroupTokens - 1) / kGroupTokens, most = kSortWords / num_experts;
    groups = static_cast<int>(all < most ? all : most);
  }
  __host__ __device__ size_t bytes(int64_t num_experts) const {
    return static_cast<size_t>((2 * groups + 1) * num_experts) * 4;
  }
};

// `words`: shared memory, SortPlaces::bytes. REQUIRES: kSortThreads threads, which all see the choice.
__device__ inline void sort_pairs(const ChosenPairs& pairs, const ExpertSizes& sizes, const ExpertPlan& plan,
                                  uint32_t* words, SortShared& shared) {
  const int num_experts = static_cast<int>(sizes.num_experts),
            num_chosen = static_cast<int>(sizes.num_chosen);
  const int num_tokens = static_cast<int>(sizes.num_tokens), expert = static_cast<int>(threadIdx.x);
  const int groups = SortPlaces(num_tokens, num_experts).groups;
  uint32_t* const bits = words;
  auto* const before = reinterpret_cast<int*>(words) + groups * num_experts;
  int* const next = before + groups * num_experts;  // of each expert: the place of its next pair
  if (expert < num_experts) next[expert] = 0;
  __syncthreads();
  visit_pairs(pairs, 0, num_tokens * num_chosen, num_experts, [&](int, int of) { atomicAdd(next + of, 1); });
  __syncthreads();
  int place = leave_runs(expert < num_experts ? next[expert] : 0, plan, shared);
  for (int first = 0; first < num_tokens; first += groups * kGroupTokens) {
    const int begin = first * num_chosen, end = min(first + groups * kGroupTokens, num_tokens) * num_chosen;
    for (int i = threadIdx.x; i < groups * num_experts; i += kSortThreads) bits[i] = 0;
    __syncthreads();
    visit_pairs(pairs, begin, end, num_experts, [&](int pair, int of) {
      const int token = pair / num_chosen - first;
      atomicOr(bits + token / kGroupTokens * num_experts + of, 1u << token % kGroupTokens);
    });
    __syncthreads();
    for (int group = 0; group < groups && expert < num_experts; ++group) {
      before[group * num_experts + expert] = place;
      place += __popc(bits[group * num_experts + expert]);
    }
    __syncthreads();
    visit_pairs(pairs, begin, end, num_experts, [&](int pair, int of) {
      const int token = pair / num_chosen - first, word = token / kGroupTokens * num_experts + of;
      plan.order[before[word] + __popc(bits[word] & bits_before(token))] = pair;
    });
    __syncthreads();
  }
}

}  // namespace bequest::cuda
