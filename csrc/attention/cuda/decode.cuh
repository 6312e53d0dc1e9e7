// Attention of tiles of at most 16 rows, where reading the keys and values is all the cost.
//
// A thread block is four warps that never wait for each other while they read: each owns every fourth step of
// the block's items (16 keys in bf16, 32 in fp8: the same bytes), a private ring of kStages steps in shared
// memory, and a private softmax state. The ring runs on over the ends of items, so that memory stays busy
// while an item is finished. At its end the four states meet in the ring slots the warps have just emptied (a
// step's keys and values are exactly the bytes of a 16 × D float tile) and become the output or the item's
// partial state. Wide and narrow items have kernels within this one, which share nothing with it but the
// grid.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "attention/cuda/decode_warp.cuh"
#include "attention/cuda/join.cuh"
#include "attention/cuda/joining_tail.cuh"
#include "attention/cuda/narrow_tail.cuh"
#include "attention/cuda/wide_tile.cuh"
#include "device/copies.cuh"
#include "device/launch.cuh"
#include "device/reductions.cuh"
#include "device/shared_memory.cuh"
#include "device/warpgroup.cuh"

namespace bequest::cuda {

// Merges the warps' states of an item (tiles[warp] null: no step of it), joins what there is to join, and
// writes the rows. By the whole block.
template <int D, class Cache>
__device__ void finish_item(const AttentionArgs& a, const WorkItem& item, const Join& join, int head,
                            float* const (&tiles)[kDecodeWarps],
                            const float2 (&scales)[kDecodeWarps][kDecodeRows]) {
  const int rows = item.num_tokens * a.group;
  if (join) join.wait(a, head);
  for (int i = threadIdx.x; i < rows * (D / 4); i += kDecodeWarps * 32) {
    const int row = i / (D / 4);
    const int column = i % (D / 4) * 4;
    float m = -INFINITY;
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w)
      if (tiles[w]) m = fmaxf(m, scales[w][row].x);
    float4 o{};
    float d = 0.0f;
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) {
      if (!tiles[w]) continue;
      const float factor = exp2f(scales[w][row].x - finite_or_zero(m));
      const auto& part = *reinterpret_cast<const float4*>(
          tiles[w] + row * D + WarpState<D, Cache, Scores::kPlain>::swizzled(row, column));
      o = {o.x + factor * part.x, o.y + factor * part.y, o.z + factor * part.z, o.w + factor * part.w};
      d += factor * scales[w][row].y;
    }
    const float factor = a.value_scale;
    RowVector vector[1] = {{{o.x * factor, o.y * factor, o.z * factor, o.w * factor}, m, d}};
    if (item.result.is_state()) {
      const int64_t state = static_cast<int64_t>(item.result.state_row() + row) * a.num_kv_heads + head;
      *reinterpret_cast<float4*>(a.state_values + state * D + column) = vector[0].o;
      if (column == 0) a.state_scales[state] = {m, d};
      continue;
    }
    if (join) join.add_to<D>(vector, a, head, {row}, {column});
    write_vector(a, item.first_token + row / a.group, head * a.group + row % a.group, column, vector[0]);
  }
}

// The items of a step in which sequences share keys, in wide tiles or in narrow ones. Whether it was one of
// them: else nothing is done. By the whole block.
template <int D, class Cache, Scores kScores>
__device__ __forceinline__ bool attend_shared_items(const AttentionArgs& a, const SharedWork& work,
                                                    const WorkItem& item, uint8_t* shared,
                                                    float2 (&scales)[kDecodeWarps][kDecodeRows]) {
  static_assert(DecodeShape<D, Cache>::kBlockBytes >= WideShape<D>::kBlockBytes);
  const int head = static_cast<int>(blockIdx.y);
  if (work.first_joining.exists()) {
    if (worker_of_block() < work.first_joining.get()) return false;
    attend_joining_items<D, Cache, kScores>(a, work, head, shared, scales);
    return true;
  }
  const bool is_wide = worker_of_block() < work.num_wide_workers;
  if (work.num_narrow_items > 0) {
    RowJoiner<D> joiner(a, work.num_narrow_items, head);
    if (is_wide)
      attend_wide_items<D, Cache, kScores>(a, item, head, true, shared);
    else
      attend_narrow_items<D, Cache, kScores>(a, work, head, shared);
    joiner.join();
    return true;
  }
  if (is_wide) attend_wide_items<D, Cache, kScores>(a, item, head, false, shared);
  return is_wide;
}

// Asks for a warp's first steps, and waits for inputs. Items and block tables came before any kernel of the
// step, and so did most keys; queries, and the keys and values of their tokens, come from the grid before.
template <class S, class Reader>
__device__ __forceinline__ void fill_ring(const AttentionArgs& a, Reader& reader, uint32_t ring_address) {
  bool has_waited = !reads_early(a);
  if (has_waited) wait_for_inputs(a);
#pragma unroll 1  // a copy of the reads for each stage takes 45 registers more of the kernel over bf16
  for (int s = 0; s < S::kStages; ++s) {
    if (!has_waited && !reader.next_is_old()) {
      wait_for_inputs(a);
      has_waited = true;
    }
    reader.read_step(ring_address + s * S::kStageBytes);
  }
  if (!has_waited) wait_for_inputs(a);
}

// Of the states of a block's warps, which meet in the ring.
struct StatePlaces {
  float2 scales[kDecodeWarps][kDecodeRows];
  float* tiles[kDecodeWarps];
};

// The line of this block's worker. By the whole block.
template <int D, class Cache, Scores kScores>
__device__ __forceinline__ void attend_line(const AttentionArgs& a, WorkItem item, uint8_t* shared,
                                            StatePlaces& states) {
  using S = DecodeShape<D, Cache>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;
  uint8_t* const ring = shared + warp * S::kWarpBytes;
  const uint32_t ring_address = shared_address(ring);

  const BlockWork<D, Cache> work{warp};
  StepReader<D, Cache, BlockWork<D, Cache>> reader(a, work, lane, head);
  fill_ring<S>(a, reader, ring_address);
  if (item.num_tokens == 0) return;
  QueryRows<D, Cache> queries;
  queries.read(a, item, head, lane);
  int stage = 0;
  for (;;) {
    const bool last = !item.next.exists();
    const WorkItem next = last ? item : load_item(a.items, item.next.get());
    const Join join(a, item);
    WarpState<D, Cache, kScores> state(a, item, queries, head, lane);
    // A step's slot is refilled once the step is done, but for the last: it carries the state to finish_item.
    int held = -1;
    for (int token = work.first_key(item); token < item.kv_end; token += S::kRoundKeys) {
      if (held >= 0) reader.read_step(ring_address + held * S::kStageBytes);
      wait_copies<S::kStages - 1>();
      __syncwarp();
      state.add_step(a, item, token, ring_address + stage * S::kStageBytes);
      __syncwarp();
      held = stage;
      stage = stage + 1 == S::kStages ? 0 : stage + 1;
    }
    float* tile = held < 0 ? nullptr : reinterpret_cast<float*>(ring + held * S::kStageBytes);
    if (held >= 0) state.store(tile, states.scales[warp], item.num_tokens * a.group);
    if (lane == 0) states.tiles[warp] = tile;
    if (!last) queries.read(a, next, head, lane);
    __syncthreads();
    float* const tiles[kDecodeWarps] = {states.tiles[0], states.tiles[1], states.tiles[2], states.tiles[3]};
    finish_item<D, Cache>(a, item, join, head, tiles, states.scales);
    __syncthreads();
    if (join && threadIdx.x == 0) join.leave(a, head);
    count_piece(a, item, head);
    if (last) return;
    if (held >= 0) reader.read_step(ring_address + held * S::kStageBytes);
    item = next;
  }
}

// Whether the line of most steps stands at the kernel's begin: 140 KB of rare code in front of it cost 3 to 4
// µs of a launch (docs/lab/kernels_decode.md). It is so where it has been timed. The other kernels would take
// up to 50 registers more for it, or spill.
template <int D, class Cache>
inline constexpr bool kLineFirst = D == 128 && std::is_same_v<Cache, Fp8Cache>;

// What this block has to do.
template <int D, class Cache, Scores kScores>
__device__ __forceinline__ void attend_items(const AttentionArgs& a, uint8_t* shared) {
  __shared__ StatePlaces states;
  const WorkItem item = load_item(a.items, worker_of_block());
  // Where there is a bias nothing is shared; wide tiles are for Hopper, and nothing is narrow without them.
  if constexpr (kIsHopper && kScores != Scores::kBias) {
    const SharedWork work(a);
    if constexpr (kLineFirst<D, Cache>) {
      // Compilers put first what is reached without a jump, and they jump to the body of a loop; they also
      // put what may follow rare code behind it, so there are two lines.
      for (int i = 0; i < work.count(); ++i) {  // once
        if (!attend_shared_items<D, Cache, kScores>(a, work, item, shared, states.scales))
          attend_line<D, Cache, kScores>(a, item, shared, states);
        return;
      }
    } else if (attend_shared_items<D, Cache, kScores>(a, work, item, shared, states.scales)) {
      return;
    }
  }
  attend_line<D, Cache, kScores>(a, item, shared, states);
}

template <int D, class Cache, Scores kScores>
__global__ void __launch_bounds__(kDecodeWarps * 32, attention_blocks_per_sm(D))
    decode_kernel(const __grid_constant__ AttentionArgs a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  // The merge, or what comes behind it, may take its place beside this grid and wait there.
  let_next_start();
  attend_items<D, Cache, kScores>(a, shared);
  // Whoever comes next waits for this grid, not for the one ahead of it.
  if (a.follows_prefill) wait_for_previous();
}

template <int D, class Cache>
void launch_decode(const AttentionArgs& a, int workers, Scores scores, Stream stream) {
  const auto kernel = scores == Scores::kPlain     ? decode_kernel<D, Cache, Scores::kPlain>
                      : scores == Scores::kSoftCap ? decode_kernel<D, Cache, Scores::kSoftCap>
                                                   : decode_kernel<D, Cache, Scores::kBias>;
  const LaunchShape shape{.grid = dim3(workers, a.num_kv_heads),
                          .block = kDecodeWarps * kWarp,
                          .shared_bytes = static_cast<size_t>(
                              std::max(DecodeShape<D, Cache>::kBlockBytes, kNarrowBytes<D, Cache>)),
                          .overlaps_previous = true};
  launch(kernel, shape, stream, a);
}

}  // namespace bequest::cuda
