// What the attention kernels are given, and how they read it.
#pragma once

#include <cuda.h>

#include <climits>
#include <cstddef>
#include <cstdint>

#include "attention/cuda/attention.h"
#include "device/launch.cuh"
#include "ops/cuda/rope.h"

namespace bequest::cuda {

// How far the tickets of a prefill launch are drawn. Both are 0 between launches.
struct TicketCounter {
  int32_t drawn;
  int32_t blocks_done;
};

// What becomes of q · k before the softmax.
enum class Scores { kPlain, kSoftCap, kBias };

inline constexpr float kLog2E = 1.44269504f;

struct AttentionArgs {
  const void* q;
  void* out;
  const void* keys;  // of (layer, head 0) in block 0
  const int32_t* block_tables;
  const int32_t* work_list;
  const int4* items;          // of the kernel's section
  const int32_t* num_items;   // likewise
  TicketCounter* tickets;     // of the prefill kernel
  int32_t* counters;          // of wide tiles, [wide tiles, NKV]
  const int4* merges;         // where joins are, too
  int32_t num_merge_entries;  // of that section, used or not
  bool follows_prefill;  // the grid ahead is the prefill kernel, which began when all before it had ended
  // What was in the cache before the step may be read before the grid ahead has ended.
  bool reads_early;
  float* state_values;
  float2* state_scales;
  // States on their way (mailbox.cuh): [NKV, mail_rows, D / 2] pairs of o and [NKV, mail_rows, 2], {m, d}.
  uint32_t* mail;
  uint32_t* mail_scales;
  int32_t mail_rows;
  int64_t q_stride;
  int64_t block_stride;  // elements between blocks
  int64_t values_after_keys;
  int64_t max_blocks;
  int32_t head_stride;  // BS * D
  int32_t block_size;
  int32_t log2_block_size;
  int32_t head_dim;
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t group;
  int32_t window;      // INT_MAX / 2: all keys
  float score_factor;  // with a soft cap: scale / cap; else scale * log2(e); the keys' own scale in either
  float cap_factor;    // cap * log2(e)
  float value_scale;   // what the stored values are to be multiplied by
  const float* bias;   // [NQ, 2 * bias_reach + 1], or null
  int32_t bias_reach;
  const float* sinks;    // [NQ], or null
  int32_t far_position;  // what the list added to the positions of queries
};

// What o of a row's finished state {o, m, d} is to be multiplied by, but for the values' scale: 1 / d, or
// less where a sink takes its share. m is in powers of two.
__device__ __forceinline__ float output_factor(const AttentionArgs& a, int q_head, float m, float d) {
  if (!(d > 0.0f)) return 0.0f;
  if (a.sinks == nullptr) return 1.0f / d;
  const float sink = __ldg(a.sinks + q_head) * kLog2E;
  const float highest = fmaxf(m, sink);
  const float own = exp2f(m - highest);
  return own / (d * own + exp2f(sink - highest));
}

__device__ inline WorkItem load_item(const int4* items, int index) {
  const int4 a = __ldg(items + 2 * index);
  const int4 b = __ldg(items + 2 * index + 1);
  return {a.x, a.y, a.z, a.w, b.x, b.y, ResultPlace{b.z}, MaybeIndex{b.w}};
}

__device__ inline JoinEntry unpack_join(const int4& first, const int4& second) {
  return {first.x, first.y, first.z, MaybeIndex{first.w}, second.x, second.y, second.z, second.w};
}

// Entry `index` of the section of merges, which is a join.
__device__ inline JoinEntry load_join(const AttentionArgs& a, int index) {
  const int4* const entry = a.merges + 2 * index;
  return unpack_join(__ldg(entry), __ldg(entry + 1));
}

// wait_for_previous() for what decode reads first: queries, keys and values. The prefill kernel changes none
// of them.
__device__ inline void wait_for_inputs(const AttentionArgs& a) {
  if (!a.follows_prefill) wait_for_previous();
}

// Whether keys before the queries of a sequence may be read before wait_for_inputs().
__device__ inline bool reads_early(const AttentionArgs& a) {
  constexpr int kWord = offsetof(WorkListHeader, keys_are_old) / sizeof(int32_t);
  return a.reads_early && __ldg(a.work_list + kWord) != 0;
}

// The worker that this block of a decode grid (workers, NKV) is a part of. A multiprocessor has two blocks,
// half a grid apart; the second half counts backwards, so that the first workers, which have the wide tiles,
// do not meet there.
__device__ inline int worker_of_block() {
  const int x = static_cast<int>(blockIdx.x);
  return 2 * blockIdx.y < gridDim.y ? x : static_cast<int>(gridDim.x) - 1 - x;
}

// Row of a tile → its query token and which of the group's heads it is, for rows below 128.
class GroupDivider {
 public:
  __device__ explicit GroupDivider(int group) : group_(group), reciprocal_((1 << 16) / group + 1) {}
  __device__ int token(int row) const { return row * reciprocal_ >> 16; }
  __device__ int head(int row) const { return row - token(row) * group_; }

 private:
  const int group_, reciprocal_;
};

// Scores leave the tensor cores as q · k and enter the softmax in powers of two.
template <Scores kScores>
__device__ inline float score_in_log2(float dot, const AttentionArgs& a) {
  if constexpr (kScores == Scores::kSoftCap) {
    // tanh(x) = 1 - 2 / (1 + e^2x), right at both infinities; the chip's own tanh has only 11 bits.
    const float e = exp2f(2.0f * kLog2E * a.score_factor * dot);
    return a.cap_factor * (1.0f - __fdividef(2.0f, 1.0f + e));
  } else {
    return dot * a.score_factor;
  }
}

// A head's bias by distance.
class BiasRow {
 public:
  __device__ BiasRow(const AttentionArgs& a, int q_head)
      : reach_(a.bias_reach),
        shift_(a.far_position),
        middle_(a.bias + q_head * (2 * a.bias_reach + 1) + a.bias_reach) {}

  // score + bias, both in powers of two; positions as in the list.
  __device__ float add(float score, int key, int position) const {
    const int distance = max(-reach_, min(reach_, key - (position - shift_)));
    return fmaf(__ldg(middle_ + distance), kLog2E, score);
  }

 private:
  const int reach_, shift_;
  const float* const middle_;
};

// A row's reference m only moves when a score exceeds it by this much (in powers of two): the state stays
// exact because o and d use the same m, p stays below 2^8, and accumulators are almost never rescaled.
inline constexpr float kRescaleThreshold = 8.0f;

// What to subtract from scores: an empty state's m is -inf, and -inf - -inf would be NaN.
__device__ inline float finite_or_zero(float m) { return m == -INFINITY ? 0.0f : m; }

// The tickets of this launch (item ticket / NKV for kv head ticket % NKV). A launch of no more tickets than
// thread blocks, as most small steps are, touches no counter.
class Tickets {
 public:
  __device__ explicit Tickets(const AttentionArgs& a)
      : counter_(a.tickets), total_(__ldg(a.num_items) * a.num_kv_heads) {}

  __device__ MaybeIndex first() const {
    return block() < total_ ? MaybeIndex::of(block()) : MaybeIndex::none();
  }

  // A ticket nobody else has; none: there are no more. By one thread.
  __device__ MaybeIndex draw() const {
    if (total_ <= blocks()) return MaybeIndex::none();
    const int ticket = blocks() + atomicAdd(&counter_->drawn, 1);
    return ticket < total_ ? MaybeIndex::of(ticket) : MaybeIndex::none();
  }

  // When the block draws no more. By one thread; the last block leaves the counter as the next launch expects
  // it.
  __device__ void finish() const {
    if (total_ <= blocks()) return;
    __threadfence();
    if (atomicAdd(&counter_->blocks_done, 1) == blocks() - 1) *counter_ = {0, 0};
  }

 private:
  __device__ static int block() { return static_cast<int>(blockIdx.x); }
  __device__ static int blocks() { return static_cast<int>(gridDim.x); }

  TicketCounter* const counter_;
  const int total_;
};

struct PrefillMaps;  // tensor_map.cuh

// What the cache holds beside queries in bf16: kv_formats.cuh.
struct Bf16Cache;
struct Fp8Cache;

template <int D, class Cache>
void launch_decode(const AttentionArgs& a, int workers, Scores scores, Stream stream);
template <int D, class Cache>
void launch_prefill(const AttentionArgs& a, int blocks, Scores scores, Stream stream);
// On Hopper, without a bias; `maps` for the cache's type.
template <int D>
void launch_prefill_wgmma(const AttentionArgs& a, const PrefillMaps& maps, int blocks, Scores scores,
                          Stream stream);
// The same over an fp8 cache.
template <int D>
void launch_prefill_wgmma_fp8(const AttentionArgs& a, const PrefillMaps& maps, int blocks, Scores scores,
                              Stream stream);
template <int D, class Cache>
void launch_single_token(const AttentionArgs& a, const QkvParams& p, int multiprocessors, Stream stream);
// Heads of 512 (broad_heads.cu), over a cache in bf16.
void launch_broad_decode(const AttentionArgs& a, int workers, Stream stream);
void launch_broad_prefill(const AttentionArgs& a, int blocks, Stream stream);
void launch_f32(const AttentionArgs& a, DType cache, int blocks, Stream stream);
void launch_merge(const AttentionArgs& a, int blocks_per_head, Stream stream);
void launch_merge_rounded(const AttentionArgs& a, const Float8Rows& to, int64_t num_tokens, Stream stream);

}  // namespace bequest::cuda
