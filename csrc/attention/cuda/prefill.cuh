// Attention of long query tiles, where the tensor cores are the cost.
//
// A thread block of four warps holds a tile of rows (query tokens × heads of one kv head's group, so a key
// tile is read once for the whole group) and walks the keys in units of 64. A warp has 32 rows (16 for D =
// 256, where registers end): each matrix of keys or values it loads from shared memory serves two row tiles,
// which keeps shared memory behind the tensor cores. Keys, values and block ids arrive one unit ahead through
// two buffers: one barrier per unit. Those of an fp8 cache arrive in buffers of half the size, and the block
// makes a tile of float16 of each before it is used: a second barrier, in the same shared memory.
#pragma once

#include <cuda_runtime.h>

#include "attention/cuda/device_args.cuh"
#include "attention/cuda/kv_formats.cuh"
#include "device/copies.cuh"
#include "device/launch.cuh"
#include "device/pairs.cuh"
#include "device/reductions.cuh"
#include "device/shared_memory.cuh"
#include "device/tensor_core.cuh"

namespace bequest::cuda {

inline constexpr int kPrefillThreads = 128;
inline constexpr int kIdRows = 8;  // keys that share a block whatever the block size
inline constexpr int kIds = kUnitKeys / kIdRows;

template <int D>
struct PrefillShape {
  static constexpr int kRows = prefill_tile_rows(D);
  static constexpr int kRowTiles = kRows / 64;  // of 16 rows, per warp
  static constexpr int kRowBytes = D * 2;
  static constexpr int kQueryBytes = kRows * kRowBytes;
  static constexpr int kKeyBytes = kUnitKeys * kRowBytes;
  static constexpr int kBufferBytes = 2 * kKeyBytes;  // keys, then values
  static constexpr int kIdBytes = 2 * kIds * 4;
  static constexpr int kBlockBytes = kQueryBytes + 2 * kBufferBytes + kIdBytes;
  static constexpr int kChunks = D / 8;
  static constexpr int kRowsPerCopy = kPrefillThreads / kChunks;
};

// Moves an item's queries, keys and values to shared memory. By the whole block.
template <int D, class Cache>
class TileReader {
 public:
  __device__ TileReader(const AttentionArgs& a, const WorkItem& item, int head, uint8_t* shared)
      : a_(a),
        item_(item),
        head_(head),
        keys_(static_cast<const Element*>(a.keys) + static_cast<int64_t>(head) * a.head_stride),
        ids_(reinterpret_cast<int32_t*>(shared + S::kQueryBytes + 2 * S::kBufferBytes)),
        queries_(shared_address(shared)) {}

  // Where add_unit finds keys and values.
  __device__ uint32_t buffer(int unit) const {
    return queries_ + S::kQueryBytes + (kConverts ? 0 : (unit & 1) * S::kBufferBytes);
  }

  __device__ void read_queries() const {
    const int chunk = threadIdx.x % S::kChunks;
#pragma unroll 4
    for (int row = threadIdx.x / S::kChunks; row < S::kRows; row += S::kRowsPerCopy) {
      const int token = row / a_.group;
      const bf16* source = static_cast<const bf16*>(a_.q) + (item_.first_token + token) * a_.q_stride +
                           (head_ * a_.group + row % a_.group) * D + chunk * 8;
      copy_16_async(queries_ + tile_offset<D>(row, chunk), source, row < item_.num_tokens * a_.group);
    }
  }

  // What this thread has copied of the queries becomes what is multiplied with the cache.
  __device__ void convert_queries() const {
    if constexpr (kConverts) {
      const int chunk = threadIdx.x % S::kChunks;
#pragma unroll 4
      for (int row = threadIdx.x / S::kChunks; row < S::kRows; row += S::kRowsPerCopy) {
        uint32_t pairs[4];
        load_16(pairs, queries_ + tile_offset<D>(row, chunk));
#pragma unroll
        for (uint32_t& pair : pairs) pair = bf16_to_f16(pair);
        store_16(queries_ + tile_offset<D>(row, chunk), pairs);
      }
    }
  }

  // The block ids of unit `unit`, whose first key is `key`, for read_unit after the next barrier.
  __device__ void read_ids(int unit, int key) const {
    if (threadIdx.x >= kIds || key >= item_.kv_end) return;
    const int32_t* table = a_.block_tables + item_.sequence * a_.max_blocks;
    const int id_key = min(key + static_cast<int>(threadIdx.x) * kIdRows, item_.kv_end - 1);
    copy_4_async(shared_address(ids_ + (unit & 1) * kIds + threadIdx.x),
                 table + (id_key >> a_.log2_block_size));
  }

  __device__ void read_unit(int unit, int key) const {
    constexpr int kChunks = D * sizeof(Element) / 16;  // per row
    constexpr int kRowsPerCopy = kPrefillThreads / kChunks;
    const int chunk = threadIdx.x % kChunks;
    const int32_t* ids = ids_ + (unit & 1) * kIds;
#pragma unroll
    for (int i = 0; i < kUnitKeys / kRowsPerCopy; ++i) {
      const int row = i * kRowsPerCopy + threadIdx.x / kChunks;
      const Element* source = keys_ + ids[row / kIdRows] * a_.block_stride +
                              ((key + row) & (a_.block_size - 1)) * D + chunk * (D / kChunks);
      // Slots without a key the item sees may hold anything, NaN included: they become zeros.
      const bool valid = key + row >= item_.kv_begin && key + row < item_.kv_end;
      const uint32_t keys =
          kConverts ? staged(unit) + row * D + chunk * 16 : buffer(unit) + tile_offset<D>(row, chunk);
      copy_16_async(keys, source, valid);
      copy_16_async(keys + (kConverts ? S::kKeyBytes / 2 : S::kKeyBytes), source + a_.values_after_keys,
                    valid);
    }
  }

  // Of an fp8 cache: makes the tile of what has arrived.
  __device__ void convert_unit(int unit) const {
    if constexpr (kConverts) {
      const int chunk = threadIdx.x % S::kChunks;
#pragma unroll 4
      for (int row = threadIdx.x / S::kChunks; row < 2 * kUnitKeys; row += S::kRowsPerCopy) {  // keys, values
        uint32_t fours[2], pairs[4];
        load_8(fours, staged(unit) + row * D + chunk * 8);
        fp8_to_f16(fours[0], pairs[0], pairs[1]);
        fp8_to_f16(fours[1], pairs[2], pairs[3]);
        store_16(buffer(unit) + tile_offset<D>(row, chunk), pairs);
      }
    }
  }

 private:
  using S = PrefillShape<D>;
  using Element = typename Cache::Element;
  static constexpr bool kConverts = sizeof(Element) == 1;

  __device__ uint32_t staged(int unit) const {
    return queries_ + S::kQueryBytes + S::kBufferBytes + (unit & 1) * (S::kBufferBytes / 2);
  }

  const AttentionArgs& a_;
  const WorkItem& item_;
  const int head_;
  const Element* const keys_;
  int32_t* const ids_;
  const uint32_t queries_;
};

// One warp's rows of a tile. A lane holds rows lane / 4 + {0, 8} of each row tile t.
template <int D, class Cache, Scores kScores>
class WarpTile {
 public:
  using S = PrefillShape<D>;
  static constexpr int kTiles = S::kRowTiles;

  __device__ WarpTile(const AttentionArgs& a, const WorkItem& item, int head)
      : lane_(threadIdx.x % 32), first_row_(threadIdx.x / 32 * 16 * kTiles), head_(head) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        position_[t][half] = item.first_position + min(row(t, half) / a.group, item.num_tokens - 1);
        m_[t][half] = -INFINITY;
      }
  }

  // Adds the unit whose first key is `key`, with queries at `queries` and keys and values at `buffer`.
  __device__ void add_unit(const AttentionArgs& a, const WorkItem& item, int key, uint32_t queries,
                           uint32_t buffer) {
    float scores[kTiles][kUnitKeys / 8][4];
    multiply_keys(scores, queries, buffer);
    const int last_position = item.first_position + item.num_tokens - 1;
    const bool edge = key + kUnitKeys > item.first_position + 1 || key + kUnitKeys > item.kv_end ||
                      key < item.kv_begin || key <= last_position - a.window;
    if constexpr (kScores == Scores::kSoftCap) cap(a, scores);
    if constexpr (kScores == Scores::kBias) add_bias(a, key, scores);
    if (edge) mask(a, item, key, scores);
    weigh(a, scores);
    multiply_values(scores, buffer + S::kKeyBytes);
  }

  // Writes the item's rows to the output, through the warp's own rows of the query tile, or to its partial
  // state.
  __device__ void finish(const AttentionArgs& a, const WorkItem& item, int head, uint8_t* queries) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) d_[t][half] = quad_sum(d_[t][half]);
    if (item.result.is_state())
      store_state(a, item, head);
    else
      store_output(a, item, head, queries);
  }

 private:
  __device__ int row(int t, int half) const { return first_row_ + t * 16 + half * 8 + lane_ / 4; }

  __device__ void multiply_keys(float (&scores)[kTiles][kUnitKeys / 8][4], uint32_t queries,
                                uint32_t keys) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int n = 0; n < kUnitKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[t][n][e] = 0.0f;
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

  __device__ void cap(const AttentionArgs& a, float (&scores)[kTiles][kUnitKeys / 8][4]) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int n = 0; n < kUnitKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[t][n][e] = score_in_log2<Scores::kSoftCap>(scores[t][n][e], a);
  }

  __device__ void add_bias(const AttentionArgs& a, int key, float (&scores)[kTiles][kUnitKeys / 8][4]) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const BiasRow bias(a, head_ * a.group + row(t, half) % a.group);
#pragma unroll
        for (int n = 0; n < kUnitKeys / 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& score = scores[t][n][half * 2 + e];
            score = bias.add(score * a.score_factor, key + lane_ % 4 * 2 + n * 8 + e, position_[t][half]);
          }
      }
  }

  __device__ void mask(const AttentionArgs& a, const WorkItem& item, int key,
                       float (&scores)[kTiles][kUnitKeys / 8][4]) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Relative to the lane's first key, so that each comparison is with a constant.
        const int origin = key + lane_ % 4 * 2;
        const int end = min(position_[t][half] + 1, item.kv_end) - origin;
        const int begin = max(position_[t][half] - a.window + 1, item.kv_begin) - origin;
#pragma unroll
        for (int n = 0; n < kUnitKeys / 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (n * 8 + e >= end || n * 8 + e < begin) scores[t][n][half * 2 + e] = -INFINITY;
      }
  }

  // scores → softmax weights, relative to m.
  __device__ void weigh(const AttentionArgs& a, float (&scores)[kTiles][kUnitKeys / 8][4]) {
    const float factor = kScores == Scores::kPlain ? a.score_factor : 1.0f;
    float highest[kTiles][2];
    bool grows = false;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = -INFINITY;
#pragma unroll
        for (int n = 0; n < kUnitKeys / 8; ++n)
          top = fmaxf(top, fmaxf(scores[t][n][half * 2], scores[t][n][half * 2 + 1]));
        highest[t][half] = quad_max(top) * factor;
        grows = grows || highest[t][half] > m_[t][half] + kRescaleThreshold;
      }
    if (__any_sync(kAllLanes, grows)) rescale(highest);
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float m = finite_or_zero(m_[t][half]);
#pragma unroll
        for (int n = 0; n < kUnitKeys / 8; ++n)
#pragma unroll
          for (int e = half * 2; e < half * 2 + 2; ++e) {
            scores[t][n][e] = exp2f(fmaf(scores[t][n][e], factor, -m));
            d_[t][half] += scores[t][n][e];
          }
      }
  }

  __device__ void rescale(const float (&highest)[kTiles][2]) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float m = fmaxf(m_[t][half], highest[t][half]);
        const float factor = exp2f(m_[t][half] - finite_or_zero(m));
        m_[t][half] = m;
        d_[t][half] *= factor;
#pragma unroll
        for (int n = 0; n < D / 8; ++n) {
          o_[t][n][half * 2] *= factor;
          o_[t][n][half * 2 + 1] *= factor;
        }
      }
  }

  __device__ void multiply_values(const float (&weights)[kTiles][kUnitKeys / 8][4], uint32_t values) {
    const uint32_t v_address = values + lane_offset_rows_first<D>(lane_);
#pragma unroll
    for (int k = 0; k < kUnitKeys / 16; ++k) {
      uint32_t p[kTiles][4];
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float (&pair)[4] = weights[t][2 * k + i / 2];
          p[t][i] = Cache::pack_weights(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
        }
#pragma unroll
      for (int n = 0; n < D / 16; ++n) {
        uint32_t b[4];
        load_matrices_transposed(b, (v_address ^ (n * 32)) + k * 16 * S::kRowBytes);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          Cache::multiply(o_[t][2 * n], p[t], b[0], b[1]);
          Cache::multiply(o_[t][2 * n + 1], p[t], b[2], b[3]);
        }
      }
    }
  }

  __device__ void store_state(const AttentionArgs& a, const WorkItem& item, int head) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (row(t, half) >= item.num_tokens * a.group) continue;
        const int64_t state =
            static_cast<int64_t>(item.result.state_row() + row(t, half)) * a.num_kv_heads + head;
        if (lane_ % 4 == 0) a.state_scales[state] = {m_[t][half], d_[t][half]};
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
          *reinterpret_cast<float2*>(a.state_values + state * D + n * 8 + lane_ % 4 * 2) = {
              o_[t][n][half * 2] * a.value_scale, o_[t][n][half * 2 + 1] * a.value_scale};
      }
  }

  __device__ void store_output(const AttentionArgs& a, const WorkItem& item, int head,
                               uint8_t* queries) const {
    __syncwarp();  // all lanes have read the queries
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int q_head = head * a.group + row(t, half) % a.group;
        const float factor = output_factor(a, q_head, m_[t][half], d_[t][half]) * a.value_scale;
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
          *reinterpret_cast<uint32_t*>(queries + tile_offset<D>(row(t, half), n) + lane_ % 4 * 4) =
              pack(o_[t][n][half * 2] * factor, o_[t][n][half * 2 + 1] * factor);
      }
    __syncwarp();
    const int chunk = lane_ % S::kChunks;
#pragma unroll 4
    for (int r = first_row_ + lane_ / S::kChunks; r < first_row_ + 16 * kTiles; r += 32 / S::kChunks) {
      if (r >= item.num_tokens * a.group) break;
      const int64_t token = item.first_token + r / a.group;
      bf16* out =
          static_cast<bf16*>(a.out) + (token * a.num_q_heads + head * a.group + r % a.group) * D + chunk * 8;
      *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(queries + tile_offset<D>(r, chunk));
    }
  }

  const int lane_;
  const int first_row_;
  const int head_;
  int position_[kTiles][2];
  float o_[kTiles][D / 8][4] = {};
  float m_[kTiles][2];
  float d_[kTiles][2] = {};
};

// Attends one item and draws the next ticket meanwhile.
template <int D, class Cache, Scores kScores>
__device__ MaybeIndex attend_item(const AttentionArgs& a, const Tickets& tickets, int ticket,
                                  uint8_t* shared) {
  // The item lies in shared memory because registers are all taken.
  __shared__ WorkItem item;
  __shared__ MaybeIndex next_ticket;
  if (threadIdx.x == 0) item = load_item(a.items, ticket / a.num_kv_heads);
  __syncthreads();
  const int head = ticket % a.num_kv_heads;
  const TileReader<D, Cache> reader(a, item, head, shared);
  const int first_key = item.kv_begin / kUnitKeys * kUnitKeys;
  const int units = (item.kv_end - first_key + kUnitKeys - 1) / kUnitKeys;
  reader.read_queries();
  reader.read_ids(0, first_key);
  reader.read_ids(1, first_key + kUnitKeys);
  commit_copies();
  WarpTile<D, Cache, kScores> tile(a, item, head);
  wait_copies<0>();
  reader.convert_queries();
  __syncthreads();
  reader.read_unit(0, first_key);
  commit_copies();
  for (int unit = 0, key = first_key; unit < units; ++unit, key += kUnitKeys) {
    wait_copies<0>();
    __syncthreads();  // the unit is here for all, and the other buffer is free
    if (unit + 1 < units) {
      reader.read_unit(unit + 1, key + kUnitKeys);
      reader.read_ids(unit, key + 2 * kUnitKeys);
      commit_copies();
    }
    if constexpr (sizeof(typename Cache::Element) == 1) {
      reader.convert_unit(unit);
      __syncthreads();
    }
    tile.add_unit(a, item, key, shared_address(shared), reader.buffer(unit));
  }
  if (threadIdx.x == 0) next_ticket = tickets.draw();
  tile.finish(a, item, head, shared);
  __syncthreads();  // before the next item's queries overwrite these
  return next_ticket;
}

template <int D, class Cache, Scores kScores>
__global__ void __launch_bounds__(kPrefillThreads, attention_blocks_per_sm(D))
    prefill_kernel(const __grid_constant__ AttentionArgs a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  let_next_start();
  const Tickets tickets(a);
  for (MaybeIndex ticket = tickets.first(); ticket.exists();)
    ticket = attend_item<D, Cache, kScores>(a, tickets, ticket.get(), shared);
  if (threadIdx.x == 0) tickets.finish();
}

template <int D, class Cache>
void launch_prefill(const AttentionArgs& a, int blocks, Scores scores, Stream stream) {
  const auto kernel = scores == Scores::kPlain     ? prefill_kernel<D, Cache, Scores::kPlain>
                      : scores == Scores::kSoftCap ? prefill_kernel<D, Cache, Scores::kSoftCap>
                                                   : prefill_kernel<D, Cache, Scores::kBias>;
  const LaunchShape shape{.grid = static_cast<unsigned>(blocks),
                          .block = kPrefillThreads,
                          .shared_bytes = PrefillShape<D>::kBlockBytes};
  launch(kernel, shape, stream, a);
}

}  // namespace bequest::cuda
