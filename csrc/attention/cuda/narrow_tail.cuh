// Steps whose decode tiles are all wide or short tails of sequences on shared prefixes (work_list.h).
//
// Every warp does its part, a tail or its share of a wide tile, and sends the states to the mailbox; then it
// waits for all states of a few rows, joins them in the order of the list and writes the rows. So no warp
// waits for another before its own part is sent, and rows are joined by all warps of the chip.
#pragma once

#include "attention/cuda/decode_warp.cuh"
#include "attention/cuda/row_joiner.cuh"
#include "device/copies.cuh"
#include "device/shared_memory.cuh"

namespace bequest::cuda {

// The second half of the list's header.
struct SharedWork {
  int first_narrow_item;
  int num_narrow_items;  // 0: tails, if there are any, are attended to by thread blocks
  int num_wide_workers;
  MaybeIndex first_joining;  // worker whose warps have narrow items that send no mail (joining_tail.cuh)

  __device__ explicit SharedWork(const AttentionArgs& a) {
    const int4 half = __ldg(reinterpret_cast<const int4*>(a.work_list) + 1);
    first_narrow_item = half.x;
    num_narrow_items = half.y;
    num_wide_workers = half.z;
    first_joining = MaybeIndex{half.w};
  }

  // 0: there is nothing but lines.
  __device__ int count() const { return max(num_wide_workers, num_narrow_items); }
};

// Steps that a warp attends to at once: as many as its registers and shared memory hold.
template <int D, class Cache>
inline constexpr int kNarrowSteps = DecodeStep<D, Cache>::kKeys > 16 || D == 256 ? 2
                                    : D == 128                                   ? 3
                                                                                 : 4;
template <int D, class Cache>
inline constexpr int kNarrowBytes =
    kDecodeWarps * kNarrowSteps<D, Cache> * DecodeShape<D, Cache>::kStageBytes;

// Copies the keys and values of one pass of a tail to a warp's stages, zeros behind the last key. Everything
// that is known before the grid ahead has ended is computed then.
template <int D, class Cache>
class TailReader {
 public:
  static constexpr int kSteps = kNarrowSteps<D, Cache>;
  using S = DecodeShape<D, Cache>;
  using Step = DecodeStep<D, Cache>;
  using Element = typename Cache::Element;

  __device__ TailReader(const AttentionArgs& a, const WorkItem& item, int head, int lane, uint32_t stages)
      : a_(a),
        table_(a.block_tables + item.sequence * a.max_blocks),
        end_(item.kv_end),
        lane_row_(lane / kChunks),
        keys_(static_cast<const Element*>(a.keys) + static_cast<int64_t>(head) * a.head_stride +
              lane_row_ * D + lane % kChunks * (D / kChunks)) {
#pragma unroll
    for (int i = 0; i < kGroupCopies; ++i)
      targets_[i] = stages + Step::offset(i * kRowsPerCopy + lane_row_, lane % kChunks);
  }

  // Where the pass at `token` is.
  __device__ void find(int token) {
    left_ = end_ - token - lane_row_;
    int32_t blocks[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
      blocks[g] = __ldg(table_ + (min(token + g * 8, end_ - 1) >> a_.log2_block_size));
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      sources_[g] = keys_ + blocks[g] * a_.block_stride + ((token + g * 8) & (a_.block_size - 1)) * D;
      asm volatile("" : "+l"(sources_[g]));  // now, not when it is needed
    }
  }

  __device__ void read() const {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const Element* const values = sources_[g] + a_.values_after_keys;
      constexpr int kStepGroups = Step::kKeys / 8;
      const int place = g / kStepGroups * S::kStageBytes + g % kStepGroups * 8 * Step::kRowBytes;
#pragma unroll
      for (int i = 0; i < kGroupCopies; ++i) {
        const bool valid = g * 8 + i * kRowsPerCopy < left_;
        copy_16_async(targets_[i] + place, sources_[g] + i * kRowsPerCopy * D, valid);
        copy_16_async(targets_[i] + place + S::kTileBytes, values + i * kRowsPerCopy * D, valid);
      }
    }
    commit_copies();
  }

 private:
  static constexpr int kChunks = Step::kRowBytes / 16;  // per row
  static constexpr int kRowsPerCopy = 32 / kChunks;
  static constexpr int kGroups = kSteps * Step::kKeys / 8;  // of keys in one block, whatever its size
  static constexpr int kGroupCopies = 8 / kRowsPerCopy;

  const AttentionArgs& a_;
  const int32_t* const table_;
  const int end_, lane_row_;
  const Element* const keys_;
  uint32_t targets_[kGroupCopies];
  const Element* sources_[kGroups];
  int left_;
};

// A tail, with `memory` of kNarrowBytes / kDecodeWarps. By a warp.
template <int D, class Cache, Scores kScores>
__device__ void attend_narrow_item(const AttentionArgs& a, const SharedWork& work, int tail, int head,
                                   uint8_t* memory) {
  using S = DecodeShape<D, Cache>;
  constexpr int kSteps = kNarrowSteps<D, Cache>;
  const int lane = threadIdx.x % 32;
  const uint32_t stages = shared_address(memory);
  WorkItem item = load_item(a.items, work.first_narrow_item + tail);
  item.num_tokens = 1;  // the compiler is to know it
  const JoinOfTail join(a, tail);
  int token = S::first_key(item);
  TailReader<D, Cache> reader(a, item, head, lane, stages);
  reader.find(token);
  wait_for_inputs(a);
  QueryRows<D, Cache> queries;
  queries.read(a, item, head, lane);
  // As ever; but the compiler moves no load behind a branch, else queries come when all copies have.
  if (item.kv_end > token) reader.read();
  WarpState<D, Cache, kScores> state(a, item, queries, head, lane);
  for (;;) {
    wait_copies<0>();
    __syncwarp();
    state.template add_steps<kSteps>(a, item, token, stages);
    token += kSteps * S::kStepKeys;
    if (token >= item.kv_end) break;
    __syncwarp();
    reader.find(token);
    reader.read();
  }
  state.send(a, head, join.entry().tail_row, a.group);
}

// The tails of this block's warps, each for itself.
template <int D, class Cache, Scores kScores>
__device__ void attend_narrow_items(const AttentionArgs& a, const SharedWork& work, int head,
                                    uint8_t* shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int stride = (static_cast<int>(gridDim.x) - work.num_wide_workers) * kDecodeWarps;
  int tail = (worker_of_block() - work.num_wide_workers) * kDecodeWarps + warp;
  if (tail >= work.num_narrow_items) return wait_for_inputs(a);
  for (; tail < work.num_narrow_items; tail += stride) {
    attend_narrow_item<D, Cache, kScores>(a, work, tail, head,
                                          shared + warp * (kNarrowBytes<D, Cache> / kDecodeWarps));
    __syncwarp();
  }
}

}  // namespace bequest::cuda
