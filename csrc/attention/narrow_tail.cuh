// Narrow items (work_list.h): short tails of sequences on a shared prefix, each attended to by a single warp,
// which joins the shared states to its own and writes the rows. Warps do not meet.
#pragma once

#include "attention/decode_warp.cuh"
#include "attention/join.cuh"

namespace bequest {

// The narrow items of a warp.
template <int D, class Cache>
class NarrowWork {
 public:
  static constexpr int kStep = DecodeShape<D, Cache>::kStepKeys;

  // `header`: the second half of the list's.
  __device__ NarrowWork(const int4& header, int warp)
      : first_(header.x + (worker_of_block() - header.z) * kDecodeWarps + warp),
        stride_((static_cast<int>(gridDim.x) - header.z) * kDecodeWarps),
        end_(header.x + header.y) {}

  __device__ static bool is_for_this_block(const int4& header) {
    return header.y > 0 && worker_of_block() >= header.z;
  }

  __device__ int first_item() const { return checked(first_); }
  __device__ int after(int index, const WorkItem&) const { return checked(index + stride_); }
  __device__ int first_key(const WorkItem& item) const { return DecodeShape<D, Cache>::first_key(item); }

 private:
  __device__ int checked(int index) const { return index < end_ ? index : -1; }

  const int first_, stride_, end_;
};

// Joins the shared states to the tail's, which lies at `tile` and `scales`, and writes the rows. By a warp.
template <int D, class Cache>
__device__ void finish_narrow(const AttentionArgs& a, const WorkItem& item, const Join& join, int head,
                              const float* tile, const float2* scales) {
  constexpr int kVectors = 2;  // of a lane, at once
  const int count = a.group * (D / 4);
  join.wait(a, head);
  for (int first = threadIdx.x % 32; first < count; first += 32 * kVectors) {
    RowVector vectors[kVectors];
    int rows[kVectors], columns[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int index = min(first + i * 32, count - 1);
      rows[i] = index / (D / 4);
      columns[i] = index % (D / 4) * 4;
      const float4 o = *reinterpret_cast<const float4*>(
          tile + rows[i] * D + WarpState<D, Cache, Scores::kPlain>::swizzled(rows[i], columns[i]));
      const float factor = a.value_scale;
      vectors[i] = {
          {o.x * factor, o.y * factor, o.z * factor, o.w * factor}, scales[rows[i]].x, scales[rows[i]].y};
    }
    join.add_to<D>(vectors, a, head, rows, columns);
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      if (first + i * 32 < count)
        write_vector(a, item.first_token, head * a.group + rows[i], columns[i], vectors[i]);
  }
  if (threadIdx.x % 32 == 0) join.leave(a, head);
}

// `ring` and `scales` [16] are the warp's own.
template <int D, class Cache, Scores kScores>
__device__ void attend_narrow_items(const AttentionArgs& a, const NarrowWork<D, Cache>& work, int head,
                                    uint8_t* ring, float2* scales) {
  using S = DecodeShape<D, Cache>;
  const int lane = threadIdx.x % 32;
  const uint32_t ring_address = shared_address(ring);
  StepReader<D, Cache, NarrowWork<D, Cache>> reader(a, work, lane, head);
  int index = work.first_item();
  WorkItem item{};
  if (index >= 0) item = load_item(a.items, index);
  Join join(a, item);
  wait_for_inputs(a);
#pragma unroll
  for (int s = 0; s < S::kStages; ++s) reader.read_step(ring_address + s * S::kStageBytes);
  for (int stage = 0; index >= 0;) {
    QueryRows<D, Cache> queries;
    queries.read(a, item, head, lane);
    WarpState<D, Cache, kScores> state(a, item, queries, head, lane);
    // A step's slot is refilled once the step is done, but for the last: it carries the state.
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
    state.store(tile, scales, a.group);
    __syncwarp();
    finish_narrow<D, Cache>(a, item, join, head, tile, scales);
    __syncwarp();
    reader.read_step(ring_address + held * S::kStageBytes);
    index = work.after(index, item);
    if (index < 0) return;
    item = load_item(a.items, index);
    join = Join(a, item);
  }
}

}  // namespace bequest
