// Many short tails of sequences whose shared keys are read by prefill tiles (work_list.h): a warp attends to
// a tail, joins the states of the prefill tile to its own and writes the rows, so nothing is left to merge.
//
// A warp's tails are linked, and its ring of steps runs on over their ends, as that of a thread block does
// over the ends of its items (decode.cuh). Four tails of a block are on their way at once instead of one.
#pragma once

#include "attention/cuda/decode_warp.cuh"
#include "attention/cuda/join.cuh"
#include "attention/cuda/narrow_tail.cuh"
#include "device/copies.cuh"
#include "device/shared_memory.cuh"

namespace bequest::cuda {

// The tails of a warp, all steps of each.
template <int D, class Cache>
struct TailWork {
  static constexpr int kStep = DecodeShape<D, Cache>::kStepKeys;
  int first;

  __device__ MaybeIndex first_item() const { return MaybeIndex::of(first); }
  __device__ MaybeIndex after(const WorkItem& item) const { return item.next; }
  __device__ int first_key(const WorkItem& item) const { return DecodeShape<D, Cache>::first_key(item); }
};

// Joins what the prefill tile has left to the state of a tail, which is at `tile` and `scales`, and writes
// the rows. By a warp.
template <int D, class Cache>
__device__ void finish_tail(const AttentionArgs& a, const WorkItem& item, const Join& join, int head,
                            int lane, const float* tile, const float2* scales) {
  // In flight: more would take the whole kernel from 202 registers to 252, and from the next grid its place.
  constexpr int kStates = 2;
  join.wait(a, head);
#pragma unroll 1
  for (int i = lane; i < a.group * (D / 4); i += 32) {
    const int row = i / (D / 4);
    const int column = i % (D / 4) * 4;
    const auto& o = *reinterpret_cast<const float4*>(
        tile + row * D + WarpState<D, Cache, Scores::kPlain>::swizzled(row, column));
    const float factor = a.value_scale;
    RowVector vector[1] = {
        {{o.x * factor, o.y * factor, o.z * factor, o.w * factor}, scales[row].x, scales[row].y}};
    join.add_to<D, 1, kStates>(vector, a, head, {row}, {column});
    write_vector(a, item.first_token, head * a.group + row, column, vector[0]);
  }
}

// The tails of this block's warps, each for itself, with memory for the scales of their states.
template <int D, class Cache, Scores kScores>
__device__ void attend_joining_items(const AttentionArgs& a, const SharedWork& work, int head,
                                     uint8_t* shared, float2 (&scales)[kDecodeWarps][kDecodeRows]) {
  using S = DecodeShape<D, Cache>;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int tail = (worker_of_block() - work.first_joining.get()) * kDecodeWarps + warp;
  if (tail >= work.num_narrow_items) return wait_for_inputs(a);
  uint8_t* const ring = shared + warp * S::kWarpBytes;
  const uint32_t ring_address = shared_address(ring);
  WorkItem item = load_item(a.items, work.first_narrow_item + tail);
  const TailWork<D, Cache> tails{work.first_narrow_item + tail};
  StepReader<D, Cache, TailWork<D, Cache>> reader(a, tails, lane, head);
  wait_for_inputs(a);
#pragma unroll
  for (int s = 0; s < S::kStages; ++s) reader.read_step(ring_address + s * S::kStageBytes);
  QueryRows<D, Cache> queries;
  queries.read(a, item, head, lane);
  int stage = 0;
  for (;;) {
    const bool last = !item.next.exists();
    const WorkItem next = last ? item : load_item(a.items, item.next.get());
    const Join join(a, item);
    item.num_tokens = 1;  // the compiler is to know it
    WarpState<D, Cache, kScores> state(a, item, queries, head, lane);
    // A step's slot is refilled once the step is done, but for the last: it carries the state. A tail has at
    // least the key of its query.
    int held = -1;
    for (int token = S::first_key(item); token < item.kv_end; token += S::kStepKeys) {
      if (held >= 0) reader.read_step(ring_address + held * S::kStageBytes);
      wait_copies<S::kStages - 1>();
      __syncwarp();
      state.add_step(a, item, token, ring_address + stage * S::kStageBytes);
      __syncwarp();
      held = stage;
      stage = stage + 1 == S::kStages ? 0 : stage + 1;
    }
    auto* const tile = reinterpret_cast<float*>(ring + held * S::kStageBytes);
    state.store(tile, scales[warp], a.group);
    if (!last) queries.read(a, next, head, lane);
    __syncwarp();
    finish_tail<D, Cache>(a, item, join, head, lane, tile, scales[warp]);
    if (last) return;
    __syncwarp();
    reader.read_step(ring_address + held * S::kStageBytes);
    item = next;
  }
}

}  // namespace bequest::cuda
