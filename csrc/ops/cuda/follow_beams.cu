// One CTA for each group, one thread for each beam. Candidates are few, and what is read and written is a few
// kilobytes: the time is that of a launch.
#include <cmath>

#include "device/launch.cuh"
#include "device/reductions.cuh"
#include "ops/cuda/beam_candidates.h"
#include "ops/cuda/follow_beams.h"

namespace bequest::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;
static_assert(kThreads >= kMaxBeamRows);

__device__ bool ends(const BeamFollower& follower, int token) {
  for (int i = 0; i < follower.num_ends; ++i)
    if (follower.ends[i] == token) return true;
  return false;
}

// How many threads before this one, and in all, hold the flag.
struct Places {
  int before;
  int all;
};

__device__ Places places_of(bool mine, int (&of_warps)[kWarps]) {
  const unsigned flags = __ballot_sync(~0u, mine);
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  __syncthreads();  // of_warps was read
  if (lane == 0) of_warps[warp] = __popc(flags);
  __syncthreads();
  Places places{__popc(flags & ((1u << lane) - 1)), 0};
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) places.before += of_warps[i];
    places.all += of_warps[i];
  }
  return places;
}

__device__ int node_behind(const FollowBeamsParams& p, const BeamFollower& follower, int parent, int token) {
  const CatalogueRule& rule = p.groups[follower.group].rule;
  if (!rule.restricts() || p.nodes_before == nullptr) return 0;
  const int node = p.nodes_before[follower.row_before + parent];
  return rule.tree.contains(node) ? rule.tree.child(node, token) : -1;
}

// The beams, and in `parents` whom they continue.
__device__ void choose(const FollowBeamsParams& p, const BeamFollower& follower, int (&parents)[kThreads]) {
  __shared__ int of_warps[kWarps];
  const auto thread = static_cast<int>(threadIdx.x);
  const int64_t first = int64_t{follower.before} * p.before.columns;
  int kept = 0;
  for (int64_t base = 0; base < p.before.columns && kept < follower.num_rows; base += kThreads) {
    const int64_t i = base + thread;
    const int token = i < p.before.columns ? p.before.token[first + i] : -1;
    const bool goes_on = token >= 0 && !ends(follower, token);
    const Places places = places_of(goes_on, of_warps);
    const int beam = kept + places.before;
    if (goes_on && beam < follower.num_rows) {
      const int parent = p.before.row[first + i];
      parents[beam] = parent;
      p.input_ids[follower.first_token + beam] = token;
      p.scores[follower.first_row + beam] = p.before.score[first + i];
      if (p.nodes != nullptr) p.nodes[follower.first_row + beam] = node_behind(p, follower, parent, token);
    }
    kept += places.all;
  }
  if (thread >= kept && thread < follower.num_rows) {
    parents[thread] = 0;
    p.input_ids[follower.first_token + thread] = 0;
    p.scores[follower.first_row + thread] = -INFINITY;
    if (p.nodes != nullptr) p.nodes[follower.first_row + thread] = 0;
  }
}

__global__ void __launch_bounds__(kThreads) follow_kernel(const FollowBeamsParams p) {
  __shared__ int parents[kThreads];
  const BeamFollower& follower = p.followers[blockIdx.x];
  choose(p, follower, parents);
  __syncthreads();
  const auto beam = static_cast<int>(threadIdx.x);
  const bool is_beam = beam < follower.num_rows;
  const int of_beam = follower.num_copies / follower.num_rows;
  for (int j = 0; j < of_beam; ++j) {
    const auto source = [&](int of) { return 2 * (follower.first_copy + of * of_beam + j); };
    const int block = is_beam ? p.copies[source(parents[beam])] : 0;
    __syncthreads();  // all have read what some are going to write
    if (is_beam) p.copies[source(beam)] = block;
  }
}

}  // namespace

void follow_beams(const FollowBeamsParams& p, Stream stream) {
  check(p.before.columns >= 1 && p.before.columns <= kMaxBeamCandidates,
        "follow_beams: columns out of range");
  launch(follow_kernel, {static_cast<unsigned>(p.num_followers), kThreads}, stream, p);
}

}  // namespace bequest::cuda
