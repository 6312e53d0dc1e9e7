// Attention of many rows over one unit of shared keys: a wide tile of the decode section (work_list.h).
//
// A run of sequences on a short prefix is a matter of latency: its keys are few, and all that is waited for
// are round trips. So a thread block takes one unit for all rows: the block ids are read before the grid
// ahead has ended, then keys, queries and values come in one round trip, are multiplied once, and the rows'
// states go out. No step loops, no ring. Registers stay below what the decode kernel takes anyway, so that
// the merge still finds room beside it: scores are turned into 16-bit weights first, and the values
// multiplied 64 columns at a time. Keys and values of an fp8 cache come through registers, which make float16
// of them.
#pragma once

#include <cuda_runtime.h>

#include "attention/device_args.cuh"
#include "attention/join.cuh"
#include "attention/kv_formats.cuh"
#include "attention/tensor_core.cuh"

namespace bequest {

template <int D>
struct WideShape {
  static constexpr int kThreads = 128;
  static constexpr int kRows = prefill_tile_rows(D);
  static constexpr int kRowBytes = D * 2;
  static constexpr int kKeyBytes = kUnitKeys * kRowBytes;  // the values follow, then the queries
  static constexpr int kQueryBytes = kRows * kRowBytes;
  static constexpr int kBlockBytes = 2 * kKeyBytes + kQueryBytes;
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
  __device__ WideReader(const AttentionArgs& a, const WorkItem& item)
      : chunk_(threadIdx.x % S::kChunks), first_row_(threadIdx.x / S::kChunks) {
    const int32_t* table = a.block_tables + item.sequence * a.max_blocks;
#pragma unroll
    for (int i = 0; i < S::kCopies; ++i)
      blocks_[i] = __ldg(table + ((item.kv_begin + i * S::kRowsPerCopy + first_row_) >> a.log2_block_size));
  }

  // Two groups of copies: keys and queries, then values. Rows from item.num_tokens * group on become zeros.
  __device__ void read(const AttentionArgs& a, const WorkItem& item, int head, uint32_t shared) const {
    const Element* keys =
        static_cast<const Element*>(a.keys) + static_cast<int64_t>(head) * a.head_stride + chunk_ * 8;
    if constexpr (sizeof(Element) == 1) {
      read_queries(a, item, head, shared);
      commit_copies();
      read_converting(a, item, keys, shared);
      wait_copies<0>();
      convert_queries(shared);
    } else {
#pragma unroll
      for (int i = 0; i < S::kCopies; ++i)
        copy_16_async(shared + key_offset(i), keys + source_of(a, item, i), true);
      read_queries(a, item, head, shared);
      commit_copies();
#pragma unroll
      for (int i = 0; i < S::kCopies; ++i)
        copy_16_async(shared + S::kKeyBytes + key_offset(i),
                      keys + source_of(a, item, i) + a.values_after_keys, true);
      commit_copies();
    }
  }

 private:
  using Element = typename Cache::Element;

  __device__ void read_queries(const AttentionArgs& a, const WorkItem& item, int head,
                               uint32_t shared) const {
    for (int row = first_row_; row < S::kRows; row += S::kRowsPerCopy) {
      const bf16* source = static_cast<const bf16*>(a.q) + (item.first_token + row / a.group) * a.q_stride +
                           (head * a.group + row % a.group) * D + chunk_ * 8;
      copy_16_async(shared + 2 * S::kKeyBytes + tile_offset<D>(row, chunk_), source,
                    row < item.num_tokens * a.group);
    }
  }

  // What this thread has copied of them.
  __device__ void convert_queries(uint32_t shared) const {
    for (int row = first_row_; row < S::kRows; row += S::kRowsPerCopy) {
      const uint32_t address = shared + 2 * S::kKeyBytes + tile_offset<D>(row, chunk_);
      uint32_t pairs[4];
      load_16(pairs, address);
#pragma unroll
      for (uint32_t& pair : pairs) pair = bf16_to_f16(pair);
      store_16(address, pairs);
    }
  }

  // All of them are asked for before the first is waited for.
  __device__ void read_converting(const AttentionArgs& a, const WorkItem& item, const Element* keys,
                                  uint32_t shared) const {
    uint2 eights[2][S::kCopies];
#pragma unroll
    for (int kind = 0; kind < 2; ++kind)
#pragma unroll
      for (int i = 0; i < S::kCopies; ++i)
        eights[kind][i] =
            *reinterpret_cast<const uint2*>(keys + source_of(a, item, i) + kind * a.values_after_keys);
#pragma unroll
    for (int kind = 0; kind < 2; ++kind)
#pragma unroll
      for (int i = 0; i < S::kCopies; ++i) {
        uint32_t pairs[4];
        fp8_to_f16(eights[kind][i].x, pairs[0], pairs[1]);
        fp8_to_f16(eights[kind][i].y, pairs[2], pairs[3]);
        store_16(shared + kind * S::kKeyBytes + key_offset(i), pairs);
      }
  }

  __device__ uint32_t key_offset(int i) const {
    return tile_offset<D>(i * S::kRowsPerCopy + first_row_, chunk_);
  }
  __device__ int64_t source_of(const AttentionArgs& a, const WorkItem& item, int i) const {
    const int key = item.kv_begin + i * S::kRowsPerCopy + first_row_;
    return blocks_[i] * a.block_stride + (key & (a.block_size - 1)) * D;
  }

  const int chunk_, first_row_;
  int32_t blocks_[S::kCopies];
};

// A warp's 16 * kTiles rows. A lane holds rows lane / 4 + {0, 8} of each row tile t.
template <int D, class Cache, Scores kScores, int kTiles>
class WideRows {
 public:
  using S = WideShape<D>;

  __device__ WideRows(const AttentionArgs& a, const WorkItem& item)
      : lane_(threadIdx.x % 32),
        first_row_(static_cast<int>(threadIdx.x) / 32 * 16 * kTiles),
        num_rows_(item.num_tokens * a.group) {}

  __device__ bool any() const { return first_row_ < num_rows_; }

  // Softmax weights of all keys of the unit, which no row masks.
  __device__ void weigh_keys(const AttentionArgs& a, uint32_t shared) {
    float scores[kTiles][kUnitKeys / 8][4] = {};
    multiply_keys(scores, shared + 2 * S::kKeyBytes, shared);
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float highest = -INFINITY;
#pragma unroll
        for (int n = 0; n < kUnitKeys / 8; ++n)
#pragma unroll
          for (int e = half * 2; e < half * 2 + 2; ++e) {
            scores[t][n][e] = score_in_log2<kScores>(scores[t][n][e], a);
            highest = fmaxf(highest, scores[t][n][e]);
          }
        m_[t][half] = quad_max(highest);
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < kUnitKeys / 8; ++n)
#pragma unroll
          for (int e = half * 2; e < half * 2 + 2; ++e) {
            scores[t][n][e] = exp2f(scores[t][n][e] - finite_or_zero(m_[t][half]));
            sum += scores[t][n][e];
          }
        d_[t][half] = quad_sum(sum);
      }
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int k = 0; k < kUnitKeys / 16; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float (&pair)[4] = scores[t][2 * k + i / 2];
          weights_[t][k][i] = Cache::pack_weights(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
        }
  }

  // Multiplies the values and writes the rows' states.
  __device__ void store_states(const AttentionArgs& a, const WorkItem& item, int head,
                               uint32_t shared) const {
    const uint32_t values = shared + S::kKeyBytes + lane_offset_rows_first<D>(lane_);
#pragma unroll
    for (int column = 0; column < D; column += 64) {
      float o[kTiles][8][4] = {};
#pragma unroll
      for (int k = 0; k < kUnitKeys / 16; ++k)
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          uint32_t b[4];
          load_matrices_transposed(b, (values ^ (column * 2 + n * 32)) + k * 16 * S::kRowBytes);
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            Cache::multiply(o[t][2 * n], weights_[t][k], b[0], b[1]);
            Cache::multiply(o[t][2 * n + 1], weights_[t][k], b[2], b[3]);
          }
        }
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = first_row_ + t * 16 + half * 8 + lane_ / 4;
          if (row >= num_rows_) continue;
          const int64_t state = static_cast<int64_t>(item.state_row + row) * a.num_kv_heads + head;
          if (column == 0 && lane_ % 4 == 0) a.state_scales[state] = {m_[t][half], d_[t][half]};
          float* target = a.state_values + state * D + column + lane_ % 4 * 2;
#pragma unroll
          for (int n = 0; n < 8; ++n)
            *reinterpret_cast<float2*>(target + n * 8) = {o[t][n][half * 2] * a.value_scale,
                                                          o[t][n][half * 2 + 1] * a.value_scale};
        }
    }
  }

 private:
  __device__ void multiply_keys(float (&scores)[kTiles][kUnitKeys / 8][4], uint32_t queries,
                                uint32_t keys) const {
    const uint32_t q_address = queries + first_row_ * S::kRowBytes + lane_offset_rows_first<D>(lane_);
    const uint32_t k_address = keys + lane_offset_columns_first<D>(lane_);
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      uint32_t q[kTiles][4];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) load_matrices(q[t], (q_address ^ (k * 32)) + t * 16 * S::kRowBytes);
#pragma unroll
      for (int n = 0; n < kUnitKeys / 16; ++n) {
        uint32_t b[4];
        load_matrices(b, (k_address ^ (k * 32)) + n * 16 * S::kRowBytes);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          Cache::multiply(scores[t][2 * n], q[t], b[0], b[1]);
          Cache::multiply(scores[t][2 * n + 1], q[t], b[2], b[3]);
        }
      }
    }
  }

  const int lane_, first_row_, num_rows_;
  uint32_t weights_[kTiles][kUnitKeys / 16][4];
  float m_[kTiles][2], d_[kTiles][2];
};

// With the unit on its way to shared memory.
template <int D, class Cache, Scores kScores, int kTiles>
__device__ void attend_wide(const AttentionArgs& a, const WorkItem& item, int head, uint32_t shared) {
  WideRows<D, Cache, kScores, kTiles> rows(a, item);
  wait_copies<1>();
  __syncthreads();
  if (rows.any()) rows.weigh_keys(a, shared);
  wait_copies<0>();
  __syncthreads();
  if (rows.any()) rows.store_states(a, item, head, shared);
}

// A worker's wide tiles. By the whole block, as its only work. REQUIRES: each item is a whole unit, leaves a
// state and has no more rows than WideShape::kRows
template <int D, class Cache, Scores kScores>
__device__ void attend_wide_items(const AttentionArgs& a, WorkItem item, int head, uint8_t* memory) {
  using S = WideShape<D>;
  const uint32_t shared = shared_address(memory);
  for (;;) {
    const WideReader<D, Cache> reader(a, item);
    wait_for_inputs(a);
    reader.read(a, item, head, shared);
    if constexpr (S::kRows > 64) {
      if (item.num_tokens * a.group > 64)
        attend_wide<D, Cache, kScores, 2>(a, item, head, shared);
      else
        attend_wide<D, Cache, kScores, 1>(a, item, head, shared);
    } else {
      attend_wide<D, Cache, kScores, 1>(a, item, head, shared);
    }
    count_piece(a, item, head);
    if (item.next < 0) return;
    item = load_item(a.items, item.next);
    __syncthreads();  // before the next unit overwrites this one
  }
}

}  // namespace bequest
