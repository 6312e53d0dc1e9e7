// The plan of experts' products (expert_plan.h): a stable counting sort of pairs by expert, by one CTA.
//
// Warps take consecutive parts of the pairs and count for themselves, so that nothing depends on timing. Sums
// over warps and experts then say where each warp's pairs of each expert go.
#pragma once

#include "device/launch.cuh"
#include "device/reductions.cuh"
#include "ops/cuda/expert_plan.h"

namespace bequest::cuda {

inline constexpr int kSortWarps = 32;
inline constexpr int kSortThreads = kSortWarps * kWarp;
static_assert(kSortThreads >= kMostExperts, "a thread has one expert");

struct SortShared {
  int rows[kSortWarps];   // of the experts of a warp's threads
  int tiles[kSortWarps];  // the same
};

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

inline size_t sort_count_bytes(int64_t num_experts) { return kSortWarps * num_experts * sizeof(int32_t); }

namespace detail {

__device__ __forceinline__ int inclusive_warp_sum(int value) {
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int before = __shfl_up_sync(kAllLanes, value, distance);
    if (static_cast<int>(threadIdx.x) % kWarp >= distance) value += before;
  }
  return value;
}

// Calls visit(pair, expert, peers) for 32 pairs of [begin, end) at a time, in order; peers: the lanes of the
// same expert. By a whole warp; lanes without an expert have -1. What a visit does the next one sees.
template <class Visit>
__device__ __forceinline__ void visit_pairs(const ChosenPairs& pairs, int begin, int end, int num_experts,
                                            Visit&& visit) {
  constexpr int kAhead = 8;  // ids that are asked for at once
  const int lane = threadIdx.x % kWarp;
  for (int base = begin; base < end; base += kAhead * kWarp) {
    int experts[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int pair = base + i * kWarp + lane;
      experts[i] = pair < end ? pairs.expert(pair, num_experts) : -1;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (base + i * kWarp >= end) break;
      const unsigned peers = __match_any_sync(kAllLanes, experts[i]);
      visit(base + i * kWarp + lane, experts[i], peers);
      __syncwarp();
    }
  }
}

}  // namespace detail

// `counts`: shared memory, sort_count_bytes. REQUIRES: kSortThreads threads, which all see the choice.
__device__ inline void sort_pairs(const ChosenPairs& pairs, const ExpertSizes& sizes, const ExpertPlan& plan,
                                  int32_t* counts, SortShared& shared) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, expert = threadIdx.x;
  const int num_pairs = static_cast<int>(sizes.num_pairs()),
            num_experts = static_cast<int>(sizes.num_experts);
  const int part = static_cast<int>(round_up(ceil_div(num_pairs, kSortWarps), kWarp));
  const int parts = static_cast<int>(ceil_div(num_pairs, part));
  const int begin = min(warp * part, num_pairs), end = min(begin + part, num_pairs);
  for (int i = threadIdx.x; i < parts * num_experts; i += kSortThreads) counts[i] = 0;
  __syncthreads();
  int32_t* const mine = counts + warp * num_experts;
  detail::visit_pairs(pairs, begin, end, num_experts, [&](int, int of, unsigned peers) {
    if (of >= 0 && lane == __ffs(static_cast<int>(peers)) - 1) mine[of] += __popc(peers);
  });
  __syncthreads();

  int rows = 0;
  for (int i = 0; i < parts && expert < num_experts; ++i) {
    const int of_part = counts[i * num_experts + expert];
    counts[i * num_experts + expert] = rows;
    rows += of_part;
  }
  const int tiles = (rows + plan.tile_rows - 1) / plan.tile_rows;
  const int rows_until = detail::inclusive_warp_sum(rows), tiles_until = detail::inclusive_warp_sum(tiles);
  if (lane == kWarp - 1) shared.rows[warp] = rows_until, shared.tiles[warp] = tiles_until;
  __syncthreads();
  ExpertRun run{expert, rows_until - rows, rows, tiles_until - tiles};
  for (int i = 0; i < warp; ++i) run.first += shared.rows[i], run.first_tile += shared.tiles[i];
  for (int i = 0; i < parts && expert < num_experts; ++i) counts[i * num_experts + expert] += run.first;
  for (int i = 0; i < tiles; ++i) plan.runs[run.first_tile + i] = run;
  if (expert == kSortThreads - 1) *plan.num_tiles = run.first_tile + tiles;
  __syncthreads();

  detail::visit_pairs(pairs, begin, end, num_experts, [&](int pair, int of, unsigned peers) {
    const int before = __popc(peers & ((1u << lane) - 1));
    const int at = of >= 0 ? mine[of] + before : 0;
    __syncwarp();
    if (of < 0) return;
    plan.order[at] = pair;
    if (before == 0) mine[of] = at + __popc(peers);
  });
}

}  // namespace bequest::cuda
