// Attention in bf16 of heads of 512, whose output no warp can hold: tiles of the decode and of the prefill
// section alike, without a soft cap or a bias.
//
// A thread block of eight warps has a tile of rows (query tokens × heads of one kv head's group) and walks
// the keys in units of 64. Scores are shared out by keys: each warp multiplies whole heads of a few keys. The
// softmax is shared out by rows, through shared memory. The output is shared out by columns: each warp keeps
// 64 of a row's 512 values. Keys and values have one buffer each: values arrive while scores are made, and
// the next keys arrive while values are summed.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "attention/cuda/device_args.cuh"
#include "device/copies.cuh"
#include "device/launch.cuh"
#include "device/pairs.cuh"
#include "device/reductions.cuh"
#include "device/shared_memory.cuh"
#include "device/tensor_core.cuh"

namespace bequest::cuda {
namespace {

constexpr int kD = kBroadHead;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kColumns = kD / kWarps;  // of the output, per warp
constexpr int kRowBytes = kD * 2;
constexpr int kChunks = kD / 8;
constexpr int kTileBytes = kUnitKeys * kRowBytes;  // of keys, or of values
constexpr int kScoreStride = kUnitKeys + 8;        // floats: rows of a quad fall into different banks

// Of tiles of kRows rows.
template <int kRows>
struct Shape {
  static constexpr int kRowTiles = kRows / 16;
  // Warps share scores out by rows, too, where there are many: else each would read all queries.
  static constexpr int kRowGroups = kRows >= 64 ? 2 : 1;
  static constexpr int kTiles = kRowTiles / kRowGroups;          // of 16 rows, per warp
  static constexpr int kKeys = kUnitKeys * kRowGroups / kWarps;  // per warp
  static constexpr int kOwnRows = kRows / kWarps;                // whose softmax a warp has
  static constexpr int kQueries = 0;
  static constexpr int kKeyTile = kQueries + kRows * kRowBytes;
  static constexpr int kValueTile = kKeyTile + kTileBytes;
  static constexpr int kWeights = kValueTile + kTileBytes;  // bf16 [kRows, 64], as a tile
  static constexpr int kScores = kWeights + kRows * kUnitKeys * 2;
  static constexpr int kFactors = kScores + kRows * kScoreStride * 4;  // [kRows]
  static constexpr int kScales = kFactors + kRows * 4;                 // {m, d} [kRows]
  static constexpr int kBytes = kScales + kRows * 8;
  static_assert(kTiles * kRowGroups == kRowTiles && kKeys % 8 == 0 && kOwnRows >= 1);
};

template <int kRows>
class BroadTile {
 public:
  using S = Shape<kRows>;

  __device__ BroadTile(const AttentionArgs& a, const WorkItem& item, int head, uint8_t* shared)
      : a_(a), item_(item), head_(head), shared_(shared), address_(shared_address(shared)) {
#pragma unroll
    for (int i = 0; i < S::kOwnRows; ++i) {
      m_[i] = -INFINITY;
      d_[i] = 0.0f;
    }
  }

  __device__ void attend() {
    const int first = item_.kv_begin / kUnitKeys * kUnitKeys;
    read_queries();
    read_rows(S::kKeyTile, 0, first);
    commit_copies();
    read_rows(S::kValueTile, a_.values_after_keys, first);
    commit_copies();
    for (int key = first; key < item_.kv_end; key += kUnitKeys) {
      wait_copies<1>();
      __syncthreads();  // the keys are here for all, and nobody reads the scores of the last unit
      multiply_keys(key);
      __syncthreads();
      read_rows(S::kKeyTile, 0, key + kUnitKeys);
      commit_copies();
      weigh();
      wait_copies<1>();
      __syncthreads();  // so are the values and their weights
      multiply_values();
      __syncthreads();
      read_rows(S::kValueTile, a_.values_after_keys, key + kUnitKeys);
      commit_copies();
    }
    wait_copies<0>();
    finish();
  }

 private:
  __device__ int num_rows() const { return item_.num_tokens * a_.group; }

  __device__ void read_queries() const {
    const int chunk = threadIdx.x % kChunks;
#pragma unroll 4
    for (int row = threadIdx.x / kChunks; row < kRows; row += kThreads / kChunks) {
      const __nv_bfloat16* source = static_cast<const __nv_bfloat16*>(a_.q) +
                                    (item_.first_token + row / a_.group) * a_.q_stride +
                                    (head_ * a_.group + row % a_.group) * kD + chunk * 8;
      copy_16_async(address_ + S::kQueries + tile_offset<kD>(row, chunk), source, row < num_rows());
    }
  }

  // Keys or values of the unit whose first key is `key`. Slots without a key that the item sees may hold
  // anything, NaN included: they become zeros.
  __device__ void read_rows(int tile, int64_t offset, int key) const {
    if (key >= item_.kv_end) return;
    const int32_t* table = a_.block_tables + item_.sequence * a_.max_blocks;
    const int chunk = threadIdx.x % kChunks;
    const __nv_bfloat16* keys = static_cast<const __nv_bfloat16*>(a_.keys) +
                                static_cast<int64_t>(head_) * a_.head_stride + offset + chunk * 8;
#pragma unroll 4
    for (int row = threadIdx.x / kChunks; row < kUnitKeys; row += kThreads / kChunks) {
      const int at = min(key + row, item_.kv_end - 1);
      const __nv_bfloat16* source = keys + __ldg(table + (at >> a_.log2_block_size)) * a_.block_stride +
                                    (at & (a_.block_size - 1)) * kD;
      const bool valid = key + row >= item_.kv_begin && key + row < item_.kv_end;
      copy_16_async(address_ + tile + tile_offset<kD>(row, chunk), source, valid);
    }
  }

  // Scores in powers of two, -inf for keys that a row does not see.
  __device__ void multiply_keys(int key) const {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int first_row = warp % S::kRowGroups * S::kTiles * 16;
    const int first_key = warp / S::kRowGroups * S::kKeys;
    float scores[S::kTiles][S::kKeys / 8][4] = {};
    const uint32_t queries =
        address_ + S::kQueries + first_row * kRowBytes + lane_offset_rows_first<kD>(lane);
    // Four chunks of 8 keys: two steps of the product.
    const uint32_t keys = address_ + S::kKeyTile + tile_offset<kD>(first_key + lane % 8, lane / 8);
#pragma unroll 4
    for (int k = 0; k < kD / 32; ++k) {
      uint32_t q[S::kTiles][2][4];
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          load_matrices(q[t][half], (queries ^ (k * 64 + half * 32)) + t * 16 * kRowBytes);
#pragma unroll
      for (int n = 0; n < S::kKeys / 8; ++n) {
        uint32_t b[4];
        load_matrices(b, (keys ^ (k * 64)) + n * 8 * kRowBytes);
#pragma unroll
        for (int t = 0; t < S::kTiles; ++t) {
          multiply_accumulate(scores[t][n], q[t][0], b[0], b[1]);
          multiply_accumulate(scores[t][n], q[t][1], b[2], b[3]);
        }
      }
    }
#pragma unroll
    for (int t = 0; t < S::kTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + t * 16 + half * 8 + lane / 4;
        const int position = item_.first_position + min(row / a_.group, item_.num_tokens - 1);
        const int begin = max(item_.kv_begin, position - a_.window + 1);
        const int end = min(item_.kv_end, position + 1);
#pragma unroll
        for (int n = 0; n < S::kKeys / 8; ++n) {
          const int column = first_key + n * 8 + lane % 4 * 2;
          float2 pair{scores[t][n][half * 2] * a_.score_factor, scores[t][n][half * 2 + 1] * a_.score_factor};
          if (key + column < begin || key + column >= end) pair.x = -INFINITY;
          if (key + column + 1 < begin || key + column + 1 >= end) pair.y = -INFINITY;
          *reinterpret_cast<float2*>(scores_of(row) + column) = pair;
        }
      }
  }

  // Scores → weights relative to m, and what the rows so far are to be multiplied by.
  __device__ void weigh() {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < S::kOwnRows; ++i) {
      const int row = warp * S::kOwnRows + i;
      const float2 pair = *reinterpret_cast<const float2*>(scores_of(row) + 2 * lane);
      const float m = fmaxf(m_[i], warp_max(fmaxf(pair.x, pair.y)));
      const float factor = exp2f(m_[i] - finite_or_zero(m));
      const float2 weight{exp2f(pair.x - finite_or_zero(m)), exp2f(pair.y - finite_or_zero(m))};
      m_[i] = m;
      d_[i] = d_[i] * factor + warp_sum(weight.x + weight.y);
      uint8_t* const place = shared_ + S::kWeights + tile_offset<kUnitKeys>(row, lane / 4) + lane % 4 * 4;
      *reinterpret_cast<uint32_t*>(place) = pack(weight.x, weight.y);
      if (lane == 0) factors()[row] = factor;
    }
  }

  __device__ void multiply_values() {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
    for (int t = 0; t < S::kRowTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float factor = factors()[t * 16 + half * 8 + lane / 4];
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          o_[t][n][half * 2] *= factor;
          o_[t][n][half * 2 + 1] *= factor;
        }
      }
    const uint32_t weights = address_ + S::kWeights + lane_offset_rows_first<kUnitKeys>(lane);
    const uint32_t values =
        (address_ + S::kValueTile + lane_offset_rows_first<kD>(lane)) ^ (warp * kColumns * 2);
#pragma unroll
    for (int k = 0; k < kUnitKeys / 16; ++k) {
      uint32_t p[S::kRowTiles][4];
#pragma unroll
      for (int t = 0; t < S::kRowTiles; ++t)
        load_matrices(p[t], (weights ^ (k * 32)) + t * 16 * kUnitKeys * 2);
#pragma unroll
      for (int n = 0; n < kColumns / 16; ++n) {
        uint32_t b[4];
        load_matrices_transposed(b, (values ^ (n * 32)) + k * 16 * kRowBytes);
#pragma unroll
        for (int t = 0; t < S::kRowTiles; ++t) {
          multiply_accumulate(o_[t][2 * n], p[t], b[0], b[1]);
          multiply_accumulate(o_[t][2 * n + 1], p[t], b[2], b[3]);
        }
      }
    }
  }

  // Writes the item's rows to the output or to its partial state.
  __device__ void finish() const {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    auto* const scales = reinterpret_cast<float2*>(shared_ + S::kScales);
#pragma unroll
    for (int i = 0; i < S::kOwnRows; ++i)
      if (lane == 0) scales[warp * S::kOwnRows + i] = {m_[i], d_[i]};
    __syncthreads();
#pragma unroll
    for (int t = 0; t < S::kRowTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = t * 16 + half * 8 + lane / 4;
        if (row < num_rows()) write_row(row, scales[row], o_[t], half);
      }
    __syncthreads();  // before the next item's rows overwrite these
  }

  __device__ void write_row(int row, const float2& scale, const float (&o)[kColumns / 8][4], int half) const {
    const int lane = threadIdx.x % kWarp;
    const int column = threadIdx.x / kWarp * kColumns + lane % 4 * 2;
    if (item_.result.is_state()) {
      const int64_t state = static_cast<int64_t>(item_.result.state_row() + row) * a_.num_kv_heads + head_;
      if (column == 0) a_.state_scales[state] = scale;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
        *reinterpret_cast<float2*>(a_.state_values + state * kD + column + n * 8) = {
            o[n][half * 2] * a_.value_scale, o[n][half * 2 + 1] * a_.value_scale};
      return;
    }
    const int head = head_ * a_.group + row % a_.group;
    const float factor = output_factor(a_, head, scale.x, scale.y) * a_.value_scale;
    const int64_t token = item_.first_token + row / a_.group;
    auto* const out = static_cast<__nv_bfloat16*>(a_.out) + (token * a_.num_q_heads + head) * kD + column;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
      *reinterpret_cast<uint32_t*>(out + n * 8) = pack(o[n][half * 2] * factor, o[n][half * 2 + 1] * factor);
  }

  __device__ float* scores_of(int row) const {
    return reinterpret_cast<float*>(shared_ + S::kScores) + row * kScoreStride;
  }
  __device__ float* factors() const { return reinterpret_cast<float*>(shared_ + S::kFactors); }

  const AttentionArgs& a_;
  const WorkItem& item_;
  const int head_;
  uint8_t* const shared_;
  const uint32_t address_;
  float o_[S::kRowTiles][kColumns / 8][4] = {};
  float m_[S::kOwnRows];
  float d_[S::kOwnRows];
};

__global__ void __launch_bounds__(kThreads) broad_decode_kernel(const __grid_constant__ AttentionArgs a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  WorkItem item = load_item(a.items, worker_of_block());
  while (item.num_tokens > 0) {
    BroadTile<kDecodeRows>(a, item, blockIdx.y, shared).attend();
    if (!item.next.exists()) return;
    item = load_item(a.items, item.next.get());
  }
}

__global__ void __launch_bounds__(kThreads) broad_prefill_kernel(const __grid_constant__ AttentionArgs a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ MaybeIndex next;
  const Tickets tickets(a);
  for (MaybeIndex ticket = tickets.first(); ticket.exists();) {
    const WorkItem item = load_item(a.items, ticket.get() / a.num_kv_heads);
    BroadTile<prefill_tile_rows(kD)>(a, item, ticket.get() % a.num_kv_heads, shared).attend();
    if (threadIdx.x == 0) next = tickets.draw();
    __syncthreads();
    ticket = next;
    __syncthreads();
  }
  if (threadIdx.x == 0) tickets.finish();
}

}  // namespace

void launch_broad_decode(const AttentionArgs& a, int workers, Stream stream) {
  const LaunchShape shape{
      .grid = dim3(workers, a.num_kv_heads), .block = kThreads, .shared_bytes = Shape<kDecodeRows>::kBytes};
  launch(broad_decode_kernel, shape, stream, a);
}

void launch_broad_prefill(const AttentionArgs& a, int blocks, Stream stream) {
  const LaunchShape shape{.grid = static_cast<unsigned>(blocks),
                          .block = kThreads,
                          .shared_bytes = Shape<prefill_tile_rows(kD)>::kBytes};
  launch(broad_prefill_kernel, shape, stream, a);
}

}  // namespace bequest::cuda
