// What a warp of the decode kernel is made of: it streams keys and values through a ring of its own and holds
// its own softmax state.
#pragma once

#include <cuda_runtime.h>

#include "attention/cuda/device_args.cuh"
#include "attention/cuda/few_queries.h"
#include "attention/cuda/kv_formats.cuh"
#include "attention/cuda/mailbox.cuh"
#include "device/copies.cuh"
#include "device/pairs.cuh"
#include "device/reductions.cuh"

namespace bequest::cuda {

inline constexpr int kDecodeWarps = 4;

template <int D, class Cache>
struct DecodeShape {
  using Step = DecodeStep<D, Cache>;
  static constexpr int kStepKeys = Step::kKeys;
  static constexpr int kRoundKeys = kDecodeWarps * kStepKeys;
  static constexpr int kTileBytes = kStepKeys * Step::kRowBytes;  // of keys; the values follow
  static constexpr int kStageBytes = 2 * kTileBytes;
  static_assert(kStageBytes == kDecodeRows * D * 4);
  // 128 KiB of steps in flight per multiprocessor: half as much again queued in front of L2
  // and cost 2 % of the bandwidth.
  static constexpr int kStages = D == 64 ? 4 : 2;
  static constexpr int kWarpBytes = kStages * kStageBytes;
  static constexpr int kBlockBytes = kDecodeWarps * kWarpBytes;

  // The first key of an item's first step.
  __device__ static int first_key(const WorkItem& item) { return item.kv_begin / kStepKeys * kStepKeys; }
};

// Copies steps of one head's keys and values to a warp's stages.
template <int D, class Cache>
class StepCopier {
 public:
  __device__ StepCopier(const AttentionArgs& a, int lane, int head)
      : a_(a),
        lane_(lane),
        keys_(static_cast<const Element*>(a.keys) + static_cast<int64_t>(head) * a.head_stride) {}

  static constexpr int kGroups = DecodeStep<D, Cache>::kKeys / 8;  // of rows in one block, whatever its size

  // The blocks of the step at `token`, of a sequence with this block table and `end` keys.
  struct Blocks {
    int ids[kGroups];
  };
  __device__ Blocks blocks_of(const int32_t* table, int token, int end) const {
    Blocks blocks;
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
      blocks.ids[g] = __ldg(table + (min(token + g * 8, end - 1) >> a_.log2_block_size));
    return blocks;
  }

  // The same in two parts, the first before it is known how many keys there are: behind the last one it may
  // read what belongs to others. most: entries that can be read
  __device__ Blocks likely_blocks_of(const int32_t* table, int token, int most) const {
    Blocks blocks;
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
      blocks.ids[g] = __ldg(table + min((token + g * 8) >> a_.log2_block_size, most - 1));
    return blocks;
  }
  // REQUIRES: token < end
  __device__ static void settle(Blocks& blocks, int token, int end) {
#pragma unroll
    for (int g = 1; g < kGroups; ++g)
      if (token + g * 8 >= end) blocks.ids[g] = blocks.ids[g - 1];  // which has no key
  }

  // Keys outside [begin, end) become zeros: their slots may hold anything, NaN included.
  __device__ void copy(uint32_t stage, const Blocks& blocks, int token, int begin, int end) const {
    const int chunk = lane_ % kChunks;
    const int lane_row = lane_ / kChunks;
    const Element* sources[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
      sources[g] = keys_ + blocks.ids[g] * a_.block_stride +
                   (((token + g * 8) & (a_.block_size - 1)) + lane_row) * D + chunk * (D / kChunks);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int row = i * kRowsPerCopy + lane_row;
      const Element* source = sources[i / kGroupCopies] + i % kGroupCopies * kRowsPerCopy * D;
      const bool valid = token + row >= begin && token + row < end;
      const uint32_t destination = stage + Step::offset(row, chunk);
      copy_16_once_async(destination, source, valid, policy_);
      copy_16_once_async(destination + DecodeShape<D, Cache>::kTileBytes, source + a_.values_after_keys,
                         valid, policy_);
    }
  }

 private:
  using Step = DecodeStep<D, Cache>;
  using Element = typename Cache::Element;
  static constexpr int kChunks = Step::kRowBytes / 16;  // per row
  static constexpr int kRowsPerCopy = 32 / kChunks;
  static constexpr int kCopies = Step::kKeys / kRowsPerCopy;
  static constexpr int kGroupCopies = kCopies / kGroups;

  const AttentionArgs& a_;
  const int lane_;
  const uint64_t policy_ = read_once_policy();
  const Element* const keys_;
};

// The items of this warp's block, and the warp's steps of them: every fourth.
template <int D, class Cache>
struct BlockWork {
  static constexpr int kStep = DecodeShape<D, Cache>::kRoundKeys;  // keys from one step to the next
  int warp;

  __device__ MaybeIndex first_item() const { return MaybeIndex::of(worker_of_block()); }
  __device__ MaybeIndex after(const WorkItem& item) const { return item.next; }
  __device__ int first_key(const WorkItem& item) const {
    return DecodeShape<D, Cache>::first_key(item) + warp * DecodeShape<D, Cache>::kStepKeys;
  }
};

// Reads one warp's steps, item after item.
template <int D, class Cache, class Work>
class StepReader {
 public:
  __device__ StepReader(const AttentionArgs& a, const Work& work, int lane, int head)
      : a_(a), copier_(a, lane, head), work_(work), item_(work.first_item()) {
    enter_item();
  }

  // Whether the next step has nothing but keys that are older than the queries of its sequence. A few of
  // these may be in tiles before that of the item.
  __device__ bool next_is_old() const {
    return token_ < end_ && token_ + DecodeShape<D, Cache>::kStepKeys <= first_position_ - kFewTokens;
  }

  // One group of copies, empty behind the last step.
  __device__ void read_step(uint32_t stage) {
    if (token_ < end_) {
      copier_.copy(stage, blocks_, token_, begin_, end_);
      token_ += Work::kStep;
      if (token_ < end_)
        fetch_blocks();
      else
        enter_item();
    }
    commit_copies();
  }

 private:
  // On to the next item that has a step for this warp.
  __device__ void enter_item() {
    token_ = end_ = 0;
    while (item_.exists()) {
      const WorkItem item = load_item(a_.items, item_.get());
      item_ = work_.after(item);
      token_ = work_.first_key(item);
      begin_ = item.kv_begin;
      end_ = item.kv_end;
      first_position_ = item.first_position;
      table_ = a_.block_tables + item.sequence * a_.max_blocks;
      if (token_ < end_) return fetch_blocks();
    }
  }

  // A step ahead of their use, so that the copies never wait for the block table.
  __device__ void fetch_blocks() { blocks_ = copier_.blocks_of(table_, token_, end_); }

  const AttentionArgs& a_;
  const StepCopier<D, Cache> copier_;
  const Work work_;
  const int32_t* table_ = nullptr;
  MaybeIndex item_;
  int token_ = 0, begin_ = 0, end_ = 0, first_position_ = 0;
  typename StepCopier<D, Cache>::Blocks blocks_ = {};
};

// A lane's part of an item's 16 query rows, as the matrix product takes it; asked for while the item before
// it is finished.
template <int D, class Cache>
struct QueryRows {
  uint32_t q[D / 16][4];

  __device__ void read(const AttentionArgs& a, const WorkItem& item, int head, int lane) {
    const int rows = item.num_tokens * a.group;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + half * 8;
      const int token = item.num_tokens == 1 ? 0 : row / a.group;  // a division takes a while
      const bf16* source = static_cast<const bf16*>(a.q) + (item.first_token + token) * a.q_stride +
                           (head * a.group + row - token * a.group) * D;
      DecodeStep<D, Cache>::read_query(q, half, row < rows ? source : nullptr, lane);
    }
  }
};

// One warp's softmax state of 16 rows. A lane holds rows lane / 4 + {0, 8}: m[half], d[half] (its own
// columns' part).
template <int D, class Cache, Scores kScores>
class WarpState {
 public:
  __device__ WarpState(const AttentionArgs& a, const WorkItem& item, const QueryRows<D, Cache>& queries,
                       int head, int lane)
      : lane_(lane), q_(queries.q) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + half * 8;
      const int token = item.num_tokens == 1 ? 0 : row / a.group;
      position_[half] = item.first_position + min(token, item.num_tokens - 1);
      q_head_[half] = head * a.group + row % a.group;
    }
  }

  // Adds the keys of the step at `token` of the item, whose tiles are at `stage`. is_first: there is nothing
  // to rescale yet
  __device__ void add_step(const AttentionArgs& a, const WorkItem& item, int token, uint32_t stage,
                           bool is_first = false) {
    add_steps<1>(a, item, token, stage, is_first);
  }

  // The same of kSteps steps, whose tiles lie one after another.
  template <int kSteps>
  __device__ void add_steps(const AttentionArgs& a, const WorkItem& item, int token, uint32_t stages,
                            bool is_first = false) {
    constexpr int kStageBytes = DecodeShape<D, Cache>::kStageBytes;
    float scores[kSteps][kTiles][4] = {};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) Step::multiply_keys(scores[s], q_, stages + s * kStageBytes, lane_);
    weigh(a, item, token, is_first, reinterpret_cast<float (&)[kSteps * kTiles][4]>(scores));
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
      Step::multiply_values(o_, scores[s], stages + s * kStageBytes + DecodeShape<D, Cache>::kTileBytes,
                            lane_);
  }

  // Leaves o at `tile` [16, D] and {m, d} at scales[16]. Columns are swizzled: see swizzled().
  __device__ void store(float* tile, float2* scales, int rows) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane_ / 4 + half * 8;
      const float d = quad_sum(d_[half]);
      if (row >= rows) continue;
      if (lane_ % 4 == 0) scales[row] = {m_[half], d};
      Step::store_row(o_, half, tile + row * D, lane_, [row](int column) { return swizzled(row, column); });
    }
  }

  // Sends the first `rows` rows to the mailbox, from row `place` of the head on.
  __device__ void send(const AttentionArgs& a, int head, int place, int rows) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane_ / 4 + half * 8;
      const float d = quad_sum(d_[half]);
      if (row >= rows) continue;
      const int64_t at = mail_place(a, head, place + row);
      if (lane_ % 4 == 0) send_scales(a, at, m_[half], d);
      Step::send_row(o_, half, mail_words<D>(a, at), lane_);
    }
  }

  // Spreads the rows that are written at once over the banks.
  __device__ static int swizzled(int row, int column) { return column ^ ((row & 3) << 3); }

 private:
  using Step = DecodeStep<D, Cache>;
  static constexpr int kTiles = Step::kKeys / 8;  // of scores, 8 keys each

  // scores → softmax weights, relative to m.
  template <int kCount>
  __device__ void weigh(const AttentionArgs& a, const WorkItem& item, int token, bool is_first,
                        float (&scores)[kCount][4]) {
    float highest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Relative to the lane's first key, so that each comparison is with a constant.
      const int origin = token + lane_ % 4 * 2, position = position_[half];
      const int begin = max(item.kv_begin, position - a.window + 1) - origin;
      const int end = min(item.kv_end, position + 1) - origin;
#pragma unroll
      for (int n = 0; n < kCount; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int key = n * 8 + e;
          float score = score_in_log2<kScores>(scores[n][half * 2 + e], a);
          if constexpr (kScores == Scores::kBias)
            score = BiasRow(a, q_head_[half]).add(score, origin + key, position);
          score = key >= begin && key < end ? score : -INFINITY;
          scores[n][half * 2 + e] = score;
          highest[half] = fmaxf(highest[half], score);
        }
    }
    highest[0] = quad_max(highest[0]);
    highest[1] = quad_max(highest[1]);
    const bool grows = highest[0] > m_[0] + kRescaleThreshold || highest[1] > m_[1] + kRescaleThreshold;
    if (is_first) {
      m_[0] = highest[0];
      m_[1] = highest[1];
    } else if (__any_sync(kAllLanes, grows)) {
      rescale(highest);
    }
#pragma unroll
    for (int n = 0; n < kCount; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[n][e] = exp2f(scores[n][e] - finite_or_zero(m_[e >> 1]));
        d_[e >> 1] += scores[n][e];
      }
  }

  __device__ void rescale(const float (&highest)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float m = fmaxf(m_[half], highest[half]);
      const float factor = exp2f(m_[half] - finite_or_zero(m));
      m_[half] = m;
      d_[half] *= factor;
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        o_[n][half * 2] *= factor;
        o_[n][half * 2 + 1] *= factor;
      }
    }
  }

  const int lane_;
  const uint32_t (&q_)[D / 16][4];
  int position_[2];
  int q_head_[2];
  float o_[D / 8][4] = {};
  float m_[2] = {-INFINITY, -INFINITY};
  float d_[2] = {0.0f, 0.0f};
};

}  // namespace bequest::cuda
