// Attention of long query tiles on Hopper: warpgroup products, keys and values through the copy engine.
//
// A thread block holds a tile of 128 rows (query tokens × heads of one kv head's group) and walks the keys in
// tiles of 128. One warpgroup loads (prefill_wgmma_load.cuh), two multiply, 64 rows each. A multiplying
// warpgroup has the scores of tile j + 1 and the product of tile j's weights with its values under way at
// once, and makes weights of the scores while the latter still runs; the two warpgroups take turns in issuing
// products, so that one's softmax falls into the other's products:
//
//   warpgroup 1   | Q·K1 P0·V0 | softmax 1  | Q·K2 P1·V1 | softmax 2  |
//   warpgroup 2   | softmax 0  | Q·K1 P0·V0 | softmax 1  | Q·K2 P1·V1 |
//
// The queries, bf16 weights in registers, accumulators and softmax are as in prefill.cuh.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "attention/cuda/device_args.cuh"
#include "attention/cuda/prefill_wgmma_load.cuh"
#include "attention/cuda/prefill_wgmma_rows.cuh"
#include "device/barriers.cuh"
#include "device/copies.cuh"
#include "device/launch.cuh"
#include "device/pairs.cuh"
#include "device/reductions.cuh"
#include "device/shared_memory.cuh"
#include "device/tensor_core.cuh"
#include "device/warpgroup.cuh"

namespace bequest::cuda {

inline constexpr int kWgmmaThreads = (1 + kMultipliers) * 128;

// A multiplying warpgroup: attends the published items, its rows of each.
//
// Wherever a product is waited for, it was issued in another iteration of a loop or behind a branch: the
// compiler moves such a wait up in straight code, before the softmax that should run beside the product.
template <int D, class Cache, Scores kScores>
class Multiplier {
 public:
  using B = PrefillBuffers<D>;
  using Softmax = RowSoftmax<kScores>;
  using Accumulator = RowAccumulator<D, Cache>;
  // Queries in registers: what is multiplied is made of them there.
  static constexpr bool kHolds = !std::is_same_v<typename Cache::Operands, Bf16Operands>;

  __device__ __forceinline__ Multiplier(const AttentionArgs& a, B& buffers, int index)
      : a_(a), buffers_(buffers), control_(buffers.control), index_(index), divider_(a.group) {}

  __device__ __forceinline__ void run() {
    if (index_ == 1) give_turn(turn(0));
    TaskReader tasks(control_);
    PrefillTask task = tasks.next();
    if (!task.exists()) return;
    float scores[kTileKeys / 2];
    Softmax softmax(a_, task.item, index_, divider_);
    Accumulator rows;
    begin(softmax, scores, task.first_key());
    PrefillTask finished{};
    float2 scales[2];  // {m, d} of the finished item's rows
    while (true) {
      if (finish_product(rows)) store(rows, finished, scales);
      rows.clear();
      attend(softmax, rows, scores, task);
      finished = task;
#pragma unroll
      for (int half = 0; half < 2; ++half) scales[half] = {softmax.m(half), softmax.d(half)};
      task = tasks.next();
      if (!task.exists()) break;
      softmax = Softmax(a_, task.item, index_, divider_);
      // The next item's first scores beside the last product of this one.
      wait_queries();
      if (finished.has_narrow_end())
        add_tile<kUnitKeys>(softmax, rows, scores, task.first_key());
      else
        add_tile<kTileKeys>(softmax, rows, scores, task.first_key());
    }
    end(rows, finished, scales);
  }

 private:
  // From the weights of an item's first tile to those of its last, which the accumulator then has taken.
  __device__ __forceinline__ void attend(Softmax& softmax, Accumulator& rows, float (&scores)[kTileKeys / 2],
                                         const PrefillTask& task) {
    int key = task.first_key();
    const int last_key = task.last_tile_key();
    const bool has_narrow_tile = task.has_narrow_end() && key < last_key;
    const int last_wide_key = has_narrow_tile ? last_key - kTileKeys : last_key;
    while (true) {
      finish_product(rows);
      rows.take(softmax, scores);
      if (key == last_wide_key) break;
      key += kTileKeys;
      add_tile<kTileKeys>(softmax, rows, scores, key);
    }
    float narrow_scores[kUnitKeys / 2];
    if (has_narrow_tile) add_tile<kTileKeys>(softmax, rows, narrow_scores, last_key);
    if constexpr (!kHolds) {
      release(control_.queries_empty[queries_.index][index_]);
      queries_.advance();
    }
    if (has_narrow_tile) {
      finish_product(rows);
      rows.take(softmax, narrow_scores);
    }
  }

  // The weights of the very first tile.
  __device__ __forceinline__ void begin(Softmax& softmax, float (&scores)[kTileKeys / 2], int key) {
    wait_queries();
    control_.keys_full[keys_.index].wait(keys_.parity);
    begin_products();
    multiply_keys(scores);
    commit_products();
    wait_products<0>(scores);
    release_keys();
    Softmax::cap(a_, scores);
    softmax.mask(scores, key);
    softmax.weigh(a_, scores);
  }

  // The weights of the next tile, beside the product with the values, kValueKeys of them, of the one before.
  template <int kValueKeys, int kCount>
  __device__ __forceinline__ void add_tile(Softmax& softmax, Accumulator& rows, float (&scores)[kCount],
                                           int key) {
    control_.keys_full[keys_.index].wait(keys_.parity);
    await_turn(turn(index_));
    begin_products();
    multiply_keys(scores);
    commit_products();
    multiply_values<kValueKeys>(rows);
    give_turn(turn(1 - index_));
    wait_products<1>(scores);
    release_keys();
    Softmax::cap(a_, scores);
    softmax.mask(scores, key);
    softmax.weigh(a_, scores);
  }

  // The last product of all.
  __device__ __forceinline__ void end(Accumulator& rows, const PrefillTask& finished,
                                      const float2 (&scales)[2]) {
    if (finished.has_narrow_end())
      multiply_values<kUnitKeys>(rows);
    else
      multiply_values<kTileKeys>(rows);
    finish_product(rows);
    if constexpr (kHolds) queries_.advance();  // back to the last item's slot
    store(rows, finished, scales);
  }

  // Where it holds queries, the loading warpgroup stores what is left in their slot, which is empty then. The
  // slots are two: `queries_` is at the finished item's when it has passed that of the next one.
  __device__ __forceinline__ void store(const Accumulator& rows, const PrefillTask& finished,
                                        const float2 (&scales)[2]) {
    if constexpr (kHolds) {
      static_assert(kTasks == 2);
      if (has_result_box(a_, finished.item, index_)) {
        rows.store_panels(a_, finished, index_, divider_, scales, queries());
        fence_async_proxy();
        __syncwarp();
      } else {
        rows.store(a_, finished, index_, divider_, scales);
      }
      release(control_.queries_empty[queries_.index][index_]);
    } else {
      rows.store(a_, finished, index_, divider_, scales);
    }
  }

  template <int kCount>
  __device__ __forceinline__ void multiply_keys(float (&scores)[kCount]) const {
    if constexpr (kHolds)
      Accumulator::multiply_keys(scores, held_, keys());
    else
      Accumulator::multiply_keys(scores, queries(), keys());
  }

  template <int kKeys>
  __device__ __forceinline__ void multiply_values(Accumulator& rows) {
    control_.values_full[values_.index].wait(values_.parity);
    begin_products();
    rows.template multiply_values<kKeys>(shared_address(buffers_.values[values_.index]));
    commit_products();
    is_product_pending_ = true;
  }

  // Waits whether a product is under way or not, as the compiler cannot know; says which it was.
  __device__ __forceinline__ bool finish_product(Accumulator& rows) {
    rows.wait_products();
    const bool was_pending = is_product_pending_;
    is_product_pending_ = false;
    if (was_pending) {
      release(control_.values_empty[values_.index]);
      values_.advance();
    }
    return was_pending;
  }

  __device__ __forceinline__ void wait_queries() {
    control_.queries_full[queries_.index][index_].wait(queries_.parity);
    if constexpr (kHolds) hold_queries();
  }
  // Takes them to registers, as what the cache is multiplied with.
  __device__ __forceinline__ void hold_queries() {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16, half = threadIdx.x % 32 / 16;
#pragma unroll
    for (int i = 0; i < D / 16; ++i)
      load_matrices(held_[i], queries() + i / 4 * B::kQueryPanelBytes + panel_offset(row, i % 4 * 2 + half));
    queries_.advance();
#pragma unroll
    for (auto& four : held_)
#pragma unroll
      for (uint32_t& pair : four) pair = bf16_to_f16(pair);
  }
  __device__ __forceinline__ void release_keys() {
    release(control_.keys_empty[keys_.index]);
    keys_.advance();
  }
  // Each warp answers for its own part of the products.
  __device__ __forceinline__ static void release(PhaseBarrier& empty) {
    if (threadIdx.x % 32 == 0) empty.arrive();
  }

  __device__ __forceinline__ uint32_t queries() const {
    return shared_address(buffers_.queries[queries_.index][index_]);
  }
  __device__ __forceinline__ uint32_t keys() const { return shared_address(buffers_.keys[keys_.index]); }
  __device__ __forceinline__ static int turn(int index) { return 1 + index; }

  const AttentionArgs& a_;
  B& buffers_;
  typename B::Control& control_;
  const int index_;
  const GroupDivider divider_;
  bool is_product_pending_ = false;
  uint32_t held_[kHolds ? D / 16 : 1][4];
  Cursor<kTasks> queries_;
  Cursor<B::kKeyStages> keys_;
  Cursor<B::kValueStages> values_;
};

// `Buffers`: those of the cache's format; load_all() of the format fills them.
template <int D, class Cache, class Buffers, Scores kScores>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    prefill_wgmma_kernel(const __grid_constant__ AttentionArgs a, const __grid_constant__ PrefillMaps maps) {
  if constexpr (kIsHopper) {
    extern __shared__ __align__(1024) uint8_t shared[];
    auto& buffers = *reinterpret_cast<Buffers*>(shared);
    if (threadIdx.x == 0) {
      prefetch_map(maps.cache);
      if (has_query_boxes(a.group)) prefetch_map(maps.queries);
      buffers.init(a.group);
    }
    wait_for_previous();
    // Not before: decode counts on it that all before this grid has ended.
    let_next_start();
    __syncthreads();
    const int warpgroup = __shfl_sync(kAllLanes, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
      shrink_registers<Buffers::kLoaderRegisters>();
      load_all(a, maps, buffers);
    } else {
      grow_registers<Buffers::kMultiplierRegisters>();
      Multiplier<D, Cache, kScores>(a, buffers, warpgroup - 1).run();
    }
  }
}

template <int D, class Cache, class Buffers>
void launch_prefill_wgmma_over(const AttentionArgs& a, const PrefillMaps& maps, int blocks, Scores scores,
                               Stream stream) {
  const auto kernel = scores == Scores::kPlain ? prefill_wgmma_kernel<D, Cache, Buffers, Scores::kPlain>
                                               : prefill_wgmma_kernel<D, Cache, Buffers, Scores::kSoftCap>;
  const LaunchShape shape{.grid = static_cast<unsigned>(blocks),
                          .block = kWgmmaThreads,
                          .shared_bytes = sizeof(Buffers),
                          .overlaps_previous = true};
  launch(kernel, shape, stream, a, maps);
}

template <int D>
void launch_prefill_wgmma(const AttentionArgs& a, const PrefillMaps& maps, int blocks, Scores scores,
                          Stream stream) {
  launch_prefill_wgmma_over<D, Bf16Cache, PrefillBuffers<D>>(a, maps, blocks, scores, stream);
}

}  // namespace bequest::cuda
