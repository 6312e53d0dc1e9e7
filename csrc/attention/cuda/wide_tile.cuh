// Attention of many rows over one unit of shared keys: a wide tile of the decode section (work_list.h).
//
// A run of sequences on a short prefix is a matter of latency: its keys are few, and all that is waited for
// are round trips. So a thread block takes one unit for all rows: the block ids are read before the grid
// ahead has ended, then keys, queries and values come in one round trip, are multiplied once, and the rows'
// states go out. No step loops, no ring. The four warps are one warpgroup: its products take a few
// instructions, where those of single warps were hundreds, each fetched once and for all. Keys and values of
// an fp8 cache come through registers, which make bf16 of them: exact, as e4m3 has fewer bits everywhere.
#pragma once

#include <cuda_runtime.h>

#include "attention/cuda/device_args.cuh"
#include "attention/cuda/join.cuh"
#include "attention/cuda/kv_formats.cuh"
#include "attention/cuda/mailbox.cuh"
#include "device/barriers.cuh"
#include "device/copies.cuh"
#include "device/exchange.cuh"
#include "device/pairs.cuh"
#include "device/reductions.cuh"
#include "device/shared_memory.cuh"
#include "device/warpgroup.cuh"

namespace bequest::cuda {

template <int D>
struct WideShape {
  static constexpr int kThreads = 128;
  static constexpr int kRows = prefill_tile_rows(D);
  static constexpr int kTileRows = 64;  // that are multiplied at once
  static constexpr int kPanels = D / kPanelColumns;
  static constexpr int kKeyPanelBytes = kUnitKeys * kPanelRowBytes;
  static constexpr int kQueryPanelBytes = kRows * kPanelRowBytes;
  static constexpr int kKeyBytes = kPanels * kKeyPanelBytes;  // the values follow, then the queries
  static constexpr int kBlockBytes = 2 * kKeyBytes + kPanels * kQueryPanelBytes;
  static constexpr int kChunks = D / 8;  // per row
  static constexpr int kRowsPerCopy = kThreads / kChunks;
  static constexpr int kCopies = kUnitKeys / kRowsPerCopy;
};

// Moves a unit and the rows that attend to it to shared memory. By the whole block.
template <int D, class Cache>
class WideReader {
 public:
  using S = WideShape<D>;

  // Reads what came before any kernel of the step.
  __device__ WideReader(const AttentionArgs& a, const WorkItem& item, int head)
      : chunk_(threadIdx.x % S::kChunks), first_row_(threadIdx.x / S::kChunks), divider_(a.group) {
    const int32_t* table = a.block_tables + item.sequence * a.max_blocks;
    const Element* keys =
        static_cast<const Element*>(a.keys) + static_cast<int64_t>(head) * a.head_stride + chunk_ * 8;
    int32_t blocks[S::kCopies];
#pragma unroll
    for (int i = 0; i < S::kCopies; ++i)
      blocks[i] = __ldg(table + ((item.kv_begin + i * S::kRowsPerCopy + first_row_) >> a.log2_block_size));
#pragma unroll
    for (int i = 0; i < S::kCopies; ++i) {
      const int key = item.kv_begin + i * S::kRowsPerCopy + first_row_;
      keys_[i] = keys + blocks[i] * a.block_stride + (key & (a.block_size - 1)) * D;
    }
  }

  // Two groups of copies: keys and queries, then values. Rows from item.num_tokens * group on are left as
  // they are: what becomes of a row depends on no other.
  __device__ void read(const AttentionArgs& a, const WorkItem& item, int head, uint32_t shared) const {
    if constexpr (sizeof(Element) == 1) {
      read_queries(a, item, head, shared);
      commit_copies();
      read_converting(a, shared);
    } else {
#pragma unroll
      for (int i = 0; i < S::kCopies; ++i) copy_16_async(shared + key_offset(i), keys_[i], true);
      read_queries(a, item, head, shared);
      commit_copies();
#pragma unroll
      for (int i = 0; i < S::kCopies; ++i)
        copy_16_async(shared + S::kKeyBytes + key_offset(i), keys_[i] + a.values_after_keys, true);
    }
    commit_copies();
  }

 private:
  using Element = typename Cache::Element;

  __device__ void read_queries(const AttentionArgs& a, const WorkItem& item, int head,
                               uint32_t shared) const {
    const bf16* const source =
        static_cast<const bf16*>(a.q) + item.first_token * a.q_stride + head * a.group * D + chunk_ * 8;
    const uint32_t target = shared + 2 * S::kKeyBytes + chunk_ / 8 * S::kQueryPanelBytes;
    const int rows = item.num_tokens * a.group;
#pragma unroll 4
    for (int row = first_row_; row < rows; row += S::kRowsPerCopy)
      copy_16_async(target + panel_offset(row, chunk_ % 8),
                    source + divider_.token(row) * a.q_stride + divider_.head(row) * D, true);
  }

  // All of them are asked for before the first is waited for.
  __device__ void read_converting(const AttentionArgs& a, uint32_t shared) const {
    uint2 eights[2][S::kCopies];
#pragma unroll
    for (int kind = 0; kind < 2; ++kind)
#pragma unroll
      for (int i = 0; i < S::kCopies; ++i)
        eights[kind][i] = *reinterpret_cast<const uint2*>(keys_[i] + kind * a.values_after_keys);
#pragma unroll
    for (int kind = 0; kind < 2; ++kind)
#pragma unroll
      for (int i = 0; i < S::kCopies; ++i) {
        uint32_t pairs[4];
        fp8_to_bf16(eights[kind][i].x, pairs[0], pairs[1]);
        fp8_to_bf16(eights[kind][i].y, pairs[2], pairs[3]);
        store_16(shared + kind * S::kKeyBytes + key_offset(i), pairs);
      }
  }

  __device__ uint32_t key_offset(int i) const {
    return chunk_ / 8 * S::kKeyPanelBytes + panel_offset(i * S::kRowsPerCopy + first_row_, chunk_ % 8);
  }

  const int chunk_, first_row_;
  const GroupDivider divider_;
  const Element* keys_[S::kCopies];
};

// The 64 rows from `first_row` on of a tile whose unit and queries are in shared memory. By the whole block;
// a lane holds rows lane / 4 + {0, 8} ("halves") of its warp's 16.
template <int D, Scores kScores>
class WideRows {
 public:
  using S = WideShape<D>;

  __device__ explicit WideRows(int first_row)
      : first_row_(first_row), row_(first_row + static_cast<int>(threadIdx.x) / 32 * 16 + lane() / 4) {}

  // Softmax weights of all keys of the unit, which no row masks.
  __device__ __forceinline__ void weigh_keys(const AttentionArgs& a, uint32_t shared) {
    const uint64_t q = operand(shared + 2 * S::kKeyBytes + first_row_ * kPanelRowBytes, kSwizzleBytes);
    const uint64_t k = operand(shared, kSwizzleBytes);
    float scores[kUnitKeys / 2];
    begin_products();
#pragma unroll
    for (int i = 0; i < D / 16; ++i)
      multiply(scores, advance(q, i / 4 * S::kQueryPanelBytes + i % 4 * 32),
               advance(k, i / 4 * S::kKeyPanelBytes + i % 4 * 32), i > 0);
    commit_products();
    wait_products<0>(scores);
    const float factor = kScores == Scores::kPlain ? a.score_factor : 1.0f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int n = 0; n < kUnitKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[n * 4 + half * 2 + e];
          if constexpr (kScores != Scores::kPlain) score = score_in_log2<kScores>(score, a);
          top[e] = fmaxf(top[e], score);
        }
      m_[half] = quad_max(fmaxf(top[0], top[1])) * factor;
      const float reference = finite_or_zero(m_[half]);
      float sums[2] = {0.0f, 0.0f};
#pragma unroll
      for (int n = 0; n < kUnitKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[n * 4 + half * 2 + e];
          score = exp2f(fmaf(score, factor, -reference));
          sums[e] += score;
        }
      d_[half] = quad_sum(sums[0] + sums[1]);
    }
#pragma unroll
    for (int i = 0; i < kUnitKeys / 4; ++i) weights_[i] = pack(scores[2 * i], scores[2 * i + 1]);
  }

  // Multiplies the values; `send(part, row, half, o)` gets the columns [part * kColumns, ...) of each row.
  static constexpr int kColumns = D < 128 ? D : 128;
  template <class Send>
  __device__ __forceinline__ void multiply_values(uint32_t shared, Send&& send) {
#pragma unroll
    for (int part = 0; part < D / kColumns; ++part) {
      const uint64_t v =
          operand(shared + S::kKeyBytes + part * (kColumns / kPanelColumns) * S::kKeyPanelBytes,
                  kSwizzleBytes, S::kKeyPanelBytes);
      float o[kColumns / 2];
      begin_products();
#pragma unroll
      for (int i = 0; i < kUnitKeys / 16; ++i)
        multiply_transposed(o, weights_ + 4 * i, advance(v, i * 16 * kPanelRowBytes), i > 0);
      commit_products();
      wait_products<0>(o);
#pragma unroll
      for (int half = 0; half < 2; ++half) send(part, row_ + half * 8, half, o);
    }
  }

  __device__ float2 scales(int half) const { return {m_[half], d_[half]}; }
  __device__ static int lane() { return threadIdx.x % 32; }

 private:
  const int first_row_, row_;
  uint32_t weights_[kUnitKeys / 4];
  float m_[2], d_[2];
};

// Where the states of a wide tile go: to tails that wait for them, or to memory.
template <int D>
struct StateWriter {
  const AttentionArgs& a;
  const WorkItem& item;
  const int head;
  const bool mailed;

  template <int kCount>
  __device__ __forceinline__ void write(int part, int row, int half, const float (&o)[kCount],
                                        const float2& scales) const {
    if (row >= item.num_tokens * a.group) return;
    const int lane = threadIdx.x % 32;
    if (mailed) {
      const int64_t place = mail_place(a, head, item.result.state_row() + row);
      if (part == 0 && lane % 4 == 0) send_scales(a, place, scales.x, scales.y);
      uint32_t* const words = mail_words<D>(a, place) + mail_word(part * kCount * 2 + lane % 4 * 2);
#pragma unroll
      for (int n = 0; n < kCount; n += 16) {
        const int i = n + half * 2;
        store_relaxed(words + n, uint4{pack(o[i], o[i + 1]), pack(o[i + 4], o[i + 5]),
                                       pack(o[i + 8], o[i + 9]), pack(o[i + 12], o[i + 13])});
      }
      return;
    }
    const int64_t state = static_cast<int64_t>(item.result.state_row() + row) * a.num_kv_heads + head;
    if (part == 0 && lane % 4 == 0) a.state_scales[state] = scales;
    float* const target = a.state_values + state * D + part * (kCount * 2) + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n)
      *reinterpret_cast<float2*>(target + n * 8) = {o[n * 4 + half * 2] * a.value_scale,
                                                    o[n * 4 + half * 2 + 1] * a.value_scale};
  }
};

// A worker's wide tiles. By the whole block, as its only work. REQUIRES: each item is a whole unit, leaves a
// state and has no more rows than WideShape::kRows
template <int D, class Cache, Scores kScores>
__device__ void attend_wide_items(const AttentionArgs& a, WorkItem item, int head, bool mailed,
                                  uint8_t* memory) {
  using S = WideShape<D>;
  const uint32_t shared = shared_address(memory);
  for (;;) {
    const WideReader<D, Cache> reader(a, item, head);
    wait_for_inputs(a);
    reader.read(a, item, head, shared);
    const StateWriter<D> writer{a, item, head, mailed};
    for (int first_row = 0; first_row < item.num_tokens * a.group; first_row += S::kTileRows) {
      WideRows<D, kScores> rows(first_row);
      if (first_row == 0) {
        wait_copies<1>();
        fence_async_proxy();
        __syncthreads();
      }
      rows.weigh_keys(a, shared);
      if (first_row == 0) {
        wait_copies<0>();
        fence_async_proxy();
        __syncthreads();
      }
      rows.multiply_values(shared, [&](int part, int row, int half, const auto& o) {
        writer.write(part, row, half, o, rows.scales(half));
      });
    }
    count_piece(a, item, head);
    if (!item.next.exists()) return;
    item = load_item(a.items, item.next.get());
    __syncthreads();  // before the next unit overwrites this one
  }
}

}  // namespace bequest::cuda
