// A warp has a token: its logits lie in registers, the best are drawn one after another by reductions over
// the warp. The rows of a small step are one CTA, which also makes the plan of the products, out of what its
// threads have in registers; else the plan is a second kernel.
#include "ops/cuda/expert_route.h"

#include <bit>

#include "device/launch.cuh"
#include "device/reductions.cuh"
#include "device/vectors.cuh"
#include "ops/cuda/expert_sort.cuh"

namespace bequest::cuda {
namespace {

constexpr int kWarpsApart = 8;  // of a CTA that does not sort
constexpr uint32_t kNone = 0;   // below the key of every score

// Larger for better scores; NaN is -inf.
__device__ __forceinline__ uint32_t key_of(float score) {
  const uint32_t bits = __float_as_uint(score != score ? -INFINITY : score);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float score_of(uint32_t key) {
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

// What makes scores of a token's logits.
struct Scorer {
  bool is_softmax;
  float top, total;  // of a softmax

  __device__ __forceinline__ float operator()(float logit) const {
    return is_softmax ? __expf(logit - top) / total : 1.0f / (1.0f + __expf(-logit));
  }
};

// The largest key of the warp's lanes is taken out: its place, the smallest of equal ones. Lane l has the
// keys of places l, l + 32, ...
template <int kPerLane>
__device__ __forceinline__ int draw_best(uint32_t (&keys)[kPerLane]) {
  const int lane = threadIdx.x % kWarp;
  uint32_t best = kNone;
  int place = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i)
    if (keys[i] > best) best = keys[i], place = i * kWarp + lane;
  const uint32_t top = __reduce_max_sync(kAllLanes, best);
  const auto winner = static_cast<int>(
      __reduce_min_sync(kAllLanes, best == top ? static_cast<unsigned>(place) : 0xffffffffu));
#pragma unroll
  for (int i = 0; i < kPerLane; ++i)
    if (i * kWarp + lane == winner) keys[i] = kNone;
  return winner;
}

// Experts outside the best groups become worse than all others. `ranked`: of the warp, [E].
template <int kPerLane>
__device__ __forceinline__ void keep_groups(uint32_t (&keys)[kPerLane], const RouteParams& p, float* ranked) {
  const int lane = threadIdx.x % kWarp, num_experts = static_cast<int>(p.sizes.num_experts);
  const int size = num_experts / p.routing.num_groups;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i)
    if (i * kWarp + lane < num_experts) ranked[i * kWarp + lane] = score_of(keys[i]);
  __syncwarp();
  float best = -INFINITY, second = -INFINITY;
  for (int i = 0; i < size && lane < p.routing.num_groups; ++i) {
    const float score = ranked[lane * size + i];
    second = fmaxf(second, fminf(best, score));
    best = fmaxf(best, score);
  }
  uint32_t groups[1] = {lane < p.routing.num_groups ? key_of(p.routing.group_best == 2 ? best + second : best)
                                                    : kNone};
  uint32_t kept = 0;
  for (int i = 0; i < p.routing.top_groups; ++i) kept |= 1u << draw_best(groups);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = i * kWarp + lane;
    if (expert < num_experts && !(kept >> expert / size & 1)) keys[i] = key_of(-INFINITY);
  }
}

template <class T, int kPerLane>
__device__ __forceinline__ Scorer load_logits(const T* logits, const RouteParams& p, float (&x)[kPerLane]) {
  const int lane = threadIdx.x % kWarp, num_experts = static_cast<int>(p.sizes.num_experts);
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    x[i] = i * kWarp + lane < num_experts ? widen(logits[i * kWarp + lane]) : -INFINITY;
    top = fmaxf(top, x[i]);
  }
  top = warp_max(top);
  float total = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) total += i * kWarp + lane < num_experts ? __expf(x[i] - top) : 0.0f;
  return {p.routing.scoring == ExpertScoring::kSoftmax, top, warp_sum(total)};
}

// By a warp. `ranked`: [E] of shared memory, used where there are groups. The expert of rank `lane`; -1:
// there is none, or it counts NaN.
template <class T, int kPerLane>
__device__ __forceinline__ int route_row(const RouteParams& p, int64_t row, float* ranked) {
  const int lane = threadIdx.x % kWarp, num_experts = static_cast<int>(p.sizes.num_experts);
  const int num_chosen = static_cast<int>(p.sizes.num_chosen);
  const T* logits = static_cast<const T*>(p.logits) + row * num_experts;
  float x[kPerLane];
  uint32_t keys[kPerLane];
  const Scorer scorer = load_logits<T, kPerLane>(logits, p, x);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = i * kWarp + lane;
    float score = scorer(x[i]);
    if (p.routing.bias != nullptr && expert < num_experts) score += __ldg(p.routing.bias + expert);
    keys[i] = expert < num_experts ? key_of(score) : kNone;
  }
  if (p.routing.num_groups > 1) keep_groups(keys, p, ranked);
  int mine = 0;
  for (int k = 0; k < num_chosen; ++k) {
    const int expert = draw_best(keys);
    if (lane == k) mine = expert;
  }
  const bool has_one = lane < num_chosen;
  float weight = has_one ? scorer(widen(logits[mine])) : 0.0f;
  if (p.routing.renormalises) weight /= warp_sum(weight) + 1e-20f;
  if (!has_one) return -1;
  p.ids[row * num_chosen + lane] = mine;
  p.weights[row * num_chosen + lane] = weight * p.routing.factor;
  return weight == weight ? mine : -1;
}

template <class T, int kPerLane>
__global__ __launch_bounds__(kWarpsApart* kWarp) void route_kernel(const __grid_constant__ RouteParams p) {
  extern __shared__ __align__(16) float ranked[];  // [warps, E]
  const int warp = threadIdx.x / kWarp;
  const int64_t row = int64_t{blockIdx.x} * kWarpsApart + warp;
  let_next_start();
  wait_for_previous();
  if (row < p.sizes.num_tokens) route_row<T, kPerLane>(p, row, ranked + warp * p.sizes.num_experts);
}

// Up to kGroupTokens tokens, and their plan.
template <class T, int kPerLane>
__global__ __launch_bounds__(kSortThreads) void route_few_kernel(const __grid_constant__ RouteParams p,
                                                                 ExpertPlan plan) {
  extern __shared__ __align__(16) float ranked[];  // [warps, E]
  __shared__ SortShared shared;
  __shared__ uint32_t bits[kMostExperts];  // the tokens of an expert
  __shared__ int firsts[kMostExperts];     // its first pair, in the order of runs
  const int token = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  bits[threadIdx.x] = 0;
  let_next_start();
  __syncthreads();
  wait_for_previous();
  const bool exists = token < p.sizes.num_tokens;
  const int mine = exists ? route_row<T, kPerLane>(p, token, ranked + token * p.sizes.num_experts) : -1;
  if (mine >= 0) atomicOr(bits + mine, 1u << token);
  __syncthreads();
  firsts[threadIdx.x] = leave_runs(__popc(bits[threadIdx.x]), plan, shared);
  __syncthreads();
  if (mine >= 0)
    plan.order[firsts[mine] + __popc(bits[mine] & bits_before(token))] =
        token * static_cast<int>(p.sizes.num_chosen) + lane;
}

__global__ __launch_bounds__(kSortThreads) void sort_kernel(ChosenPairs pairs, ExpertSizes sizes,
                                                            ExpertPlan plan) {
  extern __shared__ __align__(16) uint32_t words[];
  __shared__ SortShared shared;
  let_next_start();
  wait_for_previous();
  sort_pairs(pairs, sizes, plan, words, shared);
}

template <class T, int kPerLane>
void launch_route(const RouteParams& p, Stream stream) {
  const ExpertSizes& sizes = p.sizes;
  ExpertPlan plan = expert_plan_at(p.plan, sizes);
  plan.num_read = reinterpret_cast<unsigned long long*>(p.num_read);
  const size_t ranked_bytes = p.routing.num_groups > 1 ? sizes.num_experts * sizeof(float) : 0;  // of a warp
  static_assert(kGroupTokens <= kSortWarps);
  if (sizes.num_tokens <= kGroupTokens) {
    const LaunchShape shape{.grid = 1,
                            .block = kSortThreads,
                            .shared_bytes = ranked_bytes * kSortWarps,
                            .overlaps_previous = true};
    return launch(route_few_kernel<T, kPerLane>, shape, stream, p, plan);
  }
  const LaunchShape shape{.grid = static_cast<unsigned>(ceil_div(sizes.num_tokens, kWarpsApart)),
                          .block = kWarpsApart * kWarp,
                          .shared_bytes = ranked_bytes * kWarpsApart,
                          .overlaps_previous = true};
  launch(route_kernel<T, kPerLane>, shape, stream, p);
  const LaunchShape sort_shape{
      .grid = 1,
      .block = kSortThreads,
      .shared_bytes = SortPlaces(sizes.num_tokens, sizes.num_experts).bytes(sizes.num_experts),
      .overlaps_previous = true};
  launch(sort_kernel, sort_shape, stream, ChosenPairs{p.ids, p.weights}, sizes, plan);
}

}  // namespace

void route_experts(const RouteParams& p, Stream stream) {
  const ExpertSizes& sizes = p.sizes;
  const ExpertRouting& routing = p.routing;
  check(sizes.num_tokens >= 0 && sizes.num_tokens <= INT32_MAX / kMostChosen, "route_experts: tokens");
  check(sizes.num_experts >= 1 && sizes.num_experts <= kMostExperts, "route_experts: 1 to 1024 experts");
  check(sizes.num_chosen >= 1 && sizes.num_chosen <= std::min(kMostChosen, sizes.num_experts),
        "route_experts: a token has 1 to 32 experts, and no more than there are");
  check(routing.num_groups >= 1 && routing.num_groups <= kWarp && sizes.num_experts % routing.num_groups == 0,
        "route_experts: 1 to 32 groups of the same size");
  check(routing.top_groups >= 1 && routing.top_groups <= routing.num_groups, "route_experts: top groups");
  check(routing.group_best == 1 || routing.group_best == 2, "route_experts: a group's best one or two");
  check(is_aligned(p.plan, 16), "route_experts: the plan is aligned to 16 bytes");
  if (sizes.num_tokens == 0) return;
  dispatch(p.dtype, [&]<class T>() {
    if (sizes.num_experts <= 64) return launch_route<T, 2>(p, stream);
    if (sizes.num_experts <= 128) return launch_route<T, 4>(p, stream);
    if (sizes.num_experts <= 256) return launch_route<T, 8>(p, stream);
    if (sizes.num_experts <= 512) return launch_route<T, 16>(p, stream);
    launch_route<T, 32>(p, stream);
  });
}

}  // namespace bequest::cuda
