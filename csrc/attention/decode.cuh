// Attention of tiles of at most 16 rows, where reading the keys and values is all the cost.
//
// A thread block is four warps that never wait for each other while they read: each owns every fourth step of
// the block's items (16 keys in bf16, 32 in fp8: the same bytes), a private ring of kStages steps in shared
// memory, and a private softmax state. The ring runs on over the ends of items, so that memory stays busy
// while an item is finished. At its end the four states meet in the ring slots the warps have just emptied (a
// step's keys and values are exactly the bytes of a 16 × D float tile) and become the output or the item's
// partial state.
#pragma once

#include <cuda_runtime.h>

#include "attention/device_args.cuh"
#include "attention/kv_formats.cuh"
#include "attention/launch.cuh"
#include "attention/tensor_core.cuh"
#include "attention/wide_tile.cuh"

namespace bequest {

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

  // The first key of the warp's first step of an item.
  __device__ static int first_key(const WorkItem& item, int warp) {
    return item.kv_begin / kStepKeys * kStepKeys + warp * kStepKeys;
  }
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

// Reads one warp's steps, item after item.
template <int D, class Cache>
class StepReader {
 public:
  __device__ StepReader(const AttentionArgs& a, int warp, int lane, int head)
      : a_(a), copier_(a, lane, head), warp_(warp), item_(worker_of_block()) {
    enter_item();
  }

  // One group of copies, empty behind the last step.
  __device__ void read_step(uint32_t stage) {
    if (token_ < end_) {
      copier_.copy(stage, blocks_, token_, begin_, end_);
      token_ += S::kRoundKeys;
      if (token_ < end_)
        fetch_blocks();
      else
        enter_item();
    }
    commit_copies();
  }

 private:
  using S = DecodeShape<D, Cache>;

  // On to the next item that has a step for this warp.
  __device__ void enter_item() {
    token_ = end_ = 0;
    while (item_ >= 0) {
      const WorkItem item = load_item(a_.items, item_);
      item_ = item.next;
      token_ = S::first_key(item, warp_);
      begin_ = item.kv_begin;
      end_ = item.kv_end;
      table_ = a_.block_tables + item.sequence * a_.max_blocks;
      if (token_ < end_) return fetch_blocks();
    }
  }

  // A step ahead of their use, so that the copies never wait for the block table.
  __device__ void fetch_blocks() { blocks_ = copier_.blocks_of(table_, token_, end_); }

  const AttentionArgs& a_;
  const StepCopier<D, Cache> copier_;
  const int warp_;
  const int32_t* table_ = nullptr;
  int item_, token_ = 0, begin_ = 0, end_ = 0;
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
      const bf16* source = static_cast<const bf16*>(a.q) + (item.first_token + row / a.group) * a.q_stride +
                           (head * a.group + row % a.group) * D;
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
      position_[half] = item.first_position + min(row / a.group, item.num_tokens - 1);
      q_head_[half] = head * a.group + row % a.group;
    }
  }

  // Adds the keys of the step at `token` of the item, whose tiles are at `stage`.
  __device__ void add_step(const AttentionArgs& a, const WorkItem& item, int token, uint32_t stage) {
    float scores[kTiles][4] = {};
    Step::multiply_keys(scores, q_, stage, lane_);
    weigh(a, item, token, scores);
    Step::multiply_values(o_, scores, stage + DecodeShape<D, Cache>::kTileBytes, lane_);
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

  // Spreads the rows that are written at once over the banks.
  __device__ static int swizzled(int row, int column) { return column ^ ((row & 3) << 3); }

 private:
  using Step = DecodeStep<D, Cache>;
  static constexpr int kTiles = Step::kKeys / 8;  // of scores, 8 keys each

  // scores → softmax weights, relative to m.
  __device__ void weigh(const AttentionArgs& a, const WorkItem& item, int token, float (&scores)[kTiles][4]) {
    float highest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Relative to the lane's first key, so that each comparison is with a constant.
      const int origin = token + lane_ % 4 * 2, position = position_[half];
      const int begin = max(item.kv_begin, position - a.window + 1) - origin;
      const int end = min(item.kv_end, position + 1) - origin;
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
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
    if (__any_sync(0xffffffffu, grows)) rescale(highest);
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
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

// Merges the warps' states of an item (tiles[warp] null: no step of it) and writes the rows. By the whole
// block.
template <int D, class Cache>
__device__ void finish_item(const AttentionArgs& a, const WorkItem& item, int head,
                            float* const (&tiles)[kDecodeWarps],
                            const float2 (&scales)[kDecodeWarps][kDecodeRows]) {
  const int rows = item.num_tokens * a.group;
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
    const bool whole = item.state_row < 0;
    const float factor = !whole ? a.value_scale : d > 0.0f ? a.value_scale / d : 0.0f;
    o = {o.x * factor, o.y * factor, o.z * factor, o.w * factor};
    if (!whole) {
      const int64_t state = static_cast<int64_t>(item.state_row + row) * a.num_kv_heads + head;
      *reinterpret_cast<float4*>(a.state_values + state * D + column) = o;
      if (column == 0) a.state_scales[state] = {m, d};
    } else {
      const int64_t token = item.first_token + row / a.group;
      bf16* out =
          static_cast<bf16*>(a.out) + (token * a.num_q_heads + head * a.group + row % a.group) * D + column;
      *reinterpret_cast<uint2*>(out) = {pack(o.x, o.y), pack(o.z, o.w)};
    }
  }
}

template <int D, class Cache, Scores kScores>
__global__ void __launch_bounds__(kDecodeWarps * 32, attention_blocks_per_sm(D))
    decode_kernel(const __grid_constant__ AttentionArgs a) {
  using S = DecodeShape<D, Cache>;
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ float2 scales[kDecodeWarps][kDecodeRows];
  __shared__ float* shared_tiles[kDecodeWarps];
  // The merge may take its place beside this grid and wait there.
  asm volatile("griddepcontrol.launch_dependents;");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;
  uint8_t* const ring = shared + warp * S::kWarpBytes;
  const uint32_t ring_address = shared_address(ring);

  WorkItem item = load_item(a.items, worker_of_block());
  if constexpr (kScores != Scores::kBias) {  // where there is a bias nothing is shared
    static_assert(S::kBlockBytes >= WideShape<D>::kBlockBytes);
    if (item.num_tokens * a.group > kDecodeRows)
      return attend_wide_items<D, Cache, kScores>(a, item, head, shared);
  }
  StepReader<D, Cache> reader(a, warp, lane, head);
  // Items and block tables came before any kernel of the step; keys, values and queries come from the grid
  // before.
  asm volatile("griddepcontrol.wait;" ::: "memory");
#pragma unroll
  for (int s = 0; s < S::kStages; ++s) reader.read_step(ring_address + s * S::kStageBytes);
  if (item.num_tokens == 0) return;
  QueryRows<D, Cache> queries;
  queries.read(a, item, head, lane);
  int stage = 0;
  for (;;) {
    const bool last = item.next < 0;
    const WorkItem next = last ? item : load_item(a.items, item.next);
    WarpState<D, Cache, kScores> state(a, item, queries, head, lane);
    // A step's slot is refilled once the step is done, but for the last: it carries the state to finish_item.
    int held = -1;
    for (int token = S::first_key(item, warp); token < item.kv_end; token += S::kRoundKeys) {
      if (held >= 0) reader.read_step(ring_address + held * S::kStageBytes);
      wait_copies<S::kStages - 1>();
      __syncwarp();
      state.add_step(a, item, token, ring_address + stage * S::kStageBytes);
      __syncwarp();
      held = stage;
      stage = stage + 1 == S::kStages ? 0 : stage + 1;
    }
    float* tile = held < 0 ? nullptr : reinterpret_cast<float*>(ring + held * S::kStageBytes);
    if (held >= 0) state.store(tile, scales[warp], item.num_tokens * a.group);
    if (lane == 0) shared_tiles[warp] = tile;
    if (!last) queries.read(a, next, head, lane);
    __syncthreads();
    float* const tiles[kDecodeWarps] = {shared_tiles[0], shared_tiles[1], shared_tiles[2], shared_tiles[3]};
    finish_item<D, Cache>(a, item, head, tiles, scales);
    __syncthreads();
    if (last) return;
    if (held >= 0) reader.read_step(ring_address + held * S::kStageBytes);
    item = next;
  }
}

template <int D, class Cache>
void launch_decode(const AttentionArgs& a, int workers, Scores scores, cudaStream_t stream) {
  const auto kernel = scores == Scores::kPlain     ? decode_kernel<D, Cache, Scores::kPlain>
                      : scores == Scores::kSoftCap ? decode_kernel<D, Cache, Scores::kSoftCap>
                                                   : decode_kernel<D, Cache, Scores::kBias>;
  launch_kernel(Launch{kernel, dim3(workers, a.num_kv_heads), kDecodeWarps * 32,
                       DecodeShape<D, Cache>::kBlockBytes, Overlap::kPrevious},
                stream, a);
}

}  // namespace bequest
