// Tiles of pairs of tokens and experts, by slot and expert: counted, added up and written by one block. A
// step has few pairs beside what its products take. Pairs of a tile are in any order, which no row's bits
// depend on.
#include "device/launch.cuh"
#include "device/reductions.cuh"
#include "ops/cuda/lora.h"

namespace bequest::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;

// Slot and expert as one number; -1: the pair has no adapter, or no expert.
__device__ __forceinline__ int key_of(const LoraExpertTilesParams& p, int pair) {
  const int slot = p.slots[pair / static_cast<int>(p.num_chosen)], expert = p.ids[pair];
  const int num_experts = static_cast<int>(p.num_experts);
  return slot < 0 || expert < 0 || expert >= num_experts ? -1 : slot * num_experts + expert;
}

struct Amounts {
  int pairs, tiles;
};

__device__ __forceinline__ Amounts operator+(const Amounts& a, const Amounts& b) {
  return {a.pairs + b.pairs, a.tiles + b.tiles};
}

// What the threads before this one have; the last one's sum with its own is that of all.
__device__ __forceinline__ Amounts before(const Amounts& own, Amounts (&shared)[kWarps]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  Amounts sum = own;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const Amounts other{__shfl_up_sync(kAllLanes, sum.pairs, distance),
                        __shfl_up_sync(kAllLanes, sum.tiles, distance)};
    if (lane >= distance) sum = sum + other;
  }
  if (lane == kWarp - 1) shared[warp] = sum;
  __syncthreads();
  Amounts result{sum.pairs - own.pairs, sum.tiles - own.tiles};
  for (int i = 0; i < warp; ++i) result = result + shared[i];
  return result;
}

__global__ __launch_bounds__(kThreads) void expert_tiles_kernel(
    const __grid_constant__ LoraExpertTilesParams p) {
  __shared__ Amounts shared[kWarps];
  const int thread = static_cast<int>(threadIdx.x), num_keys = static_cast<int>(p.num_slots * p.num_experts);
  const int num_pairs = static_cast<int>(p.num_tokens * p.num_chosen);
  for (int key = thread; key < num_keys; key += kThreads) p.places[key] = 0;
  __syncthreads();
  for (int pair = thread; pair < num_pairs; pair += kThreads)
    if (const int key = key_of(p, pair); key >= 0) atomicAdd(p.places + key, 1);
  __syncthreads();
  const int each = (num_keys + kThreads - 1) / kThreads;
  const int begin = min(thread * each, num_keys), end = min(begin + each, num_keys);
  Amounts own{0, 0};
  for (int key = begin; key < end; ++key) {
    const int count = p.places[key];
    own = own + Amounts{count, (count + kLoraRows - 1) / kLoraRows};
  }
  Amounts at = before(own, shared);
  if (thread == kThreads - 1) {
    p.tiles[0] = at.tiles + own.tiles;
    p.tiles[1] = p.tiles[2] = 0;
  }
  for (int key = begin; key < end; ++key) {
    const int count = p.places[key];
    p.places[key] = at.pairs;
    for (int first = 0; first < count; first += kLoraRows) {
      int32_t* const tile = p.tiles + (1 + at.tiles) * 3;
      tile[0] = at.pairs + first, tile[1] = min(kLoraRows, count - first), tile[2] = key;
      ++at.tiles;
    }
    at.pairs += count;
  }
  __syncthreads();
  for (int pair = thread; pair < num_pairs; pair += kThreads)
    if (const int key = key_of(p, pair); key >= 0) p.rows[atomicAdd(p.places + key, 1)] = pair;
}

}  // namespace

// Begins behind the kernel ahead, and the next one begins behind it: what other kernels read of a choice
// before the one ahead of them has ended is complete then.
void lora_expert_tiles(const LoraExpertTilesParams& p, Stream stream) {
  check(p.num_tokens >= 0 && p.num_chosen >= 1 && p.num_experts >= 1 && p.num_slots >= 1,
        "lora_expert_tiles: sizes");
  check(p.num_tokens * p.num_chosen <= INT32_MAX / 4 && p.num_slots * p.num_experts <= INT32_MAX / 4,
        "lora_expert_tiles: too many pairs");
  launch(expert_tiles_kernel, {.grid = 1, .block = kThreads}, stream, p);
}

}  // namespace bequest::cuda
