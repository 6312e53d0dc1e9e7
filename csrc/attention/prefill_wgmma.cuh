// Attention of long query tiles on Hopper: warpgroup products, keys and values through the copy engine.
//
// A thread block holds a tile of 128 rows (query tokens × heads of one kv head's group) and walks the keys in
// tiles of 128. One warpgroup loads (prefill_wgmma_load.cuh), two multiply, 64 rows each. A multiplying
// warpgroup has the scores of tile j + 1 and the product of tile j's weights with its values under way at
// once, and makes weights of the scores while the latter still runs; the two warpgroups take turns in issuing
// products, so that one's softmax falls into the other's products:
//
//   warpgroup 1   | Q·K1 P0·V0 | softmax 1  | Q·K2 P1·V1 | softmax 2  |
//   warpgroup 2   | softmax 0  | Q·K1 P0·V0 | softmax 1  | Q·K2 P1·V1 |
//
// The queries, bf16 weights in registers, accumulators and softmax are as in prefill.cuh.
#pragma once

#include <cuda_runtime.h>

#include "attention/device_args.cuh"
#include "attention/hopper.cuh"
#include "attention/launch.cuh"
#include "attention/prefill_wgmma_load.cuh"

namespace bequest {

inline constexpr int kWgmmaThreads = (1 + kMultipliers) * 128;
inline constexpr int kLoaderRegisters = 40;
inline constexpr int kMultiplierRegisters = 232;

// One warpgroup's rows of a tile. A lane holds rows lane / 4 + {0, 8} of its warp's 16.
template <int D, Scores kScores>
class RowTile {
 public:
  __device__ __forceinline__ RowTile(const AttentionArgs& a, const PrefillTask& task, int multiplier,
                                     const GroupDivider& divider)
      : first_row_(multiplier * kMultiplierRows + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4) {
    const WorkItem& item = task.item;
    const int last_token = item.num_tokens - 1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = item.first_position + min(divider.token(first_row_ + half * 8), last_token);
      key_begin_[half] = max(position - a.window + 1, item.kv_begin);
      key_end_[half] = min(position + 1, item.kv_end);
      m_[half] = -INFINITY;
      d_[half] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < D / 2; ++i) o_[i] = 0.0f;
  }

  // Issues scores[64, kCount * 2] = queries · keysᵀ.
  template <int kCount>
  __device__ __forceinline__ static void multiply_keys(float (&scores)[kCount], uint32_t queries,
                                                       uint32_t keys) {
    const uint64_t q = operand(queries, kSwizzleBytes), k = operand(keys, kSwizzleBytes);
#pragma unroll
    for (int i = 0; i < D / 16; ++i)
      multiply(scores, advance(q, i / 4 * B::kQueryPanelBytes + i % 4 * 32),
               advance(k, i / 4 * B::kTilePanelBytes + i % 4 * 32), i > 0);
  }

  // Issues o += weights · values, of the tile's first kKeys keys.
  template <int kKeys>
  __device__ __forceinline__ void multiply_values(uint32_t values) {
    const uint64_t v = operand(values, kSwizzleBytes, B::kTilePanelBytes);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i)
      multiply_transposed(o_, weights_ + 4 * i, advance(v, i * 16 * kPanelRowBytes), true);
  }

  // Until no product with values is under way.
  __device__ __forceinline__ void wait_values() { wait_products<0>(o_); }

  template <int kCount>
  __device__ __forceinline__ static void cap(const AttentionArgs& a, float (&scores)[kCount]) {
    if constexpr (kScores == Scores::kSoftCap)
#pragma unroll
      for (int i = 0; i < kCount; ++i) scores[i] = score_in_log2<kScores>(scores[i], a);
  }

  // Scores of keys a row does not see become -inf. `key`: the tile's first.
  template <int kCount>
  __device__ __forceinline__ void mask(float (&scores)[kCount], int key) const {
    // Relative to the lane's first key, so that each comparison is with a constant.
    const int origin = key + threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int begin = key_begin_[half] - origin, end = key_end_[half] - origin;
#pragma unroll
      for (int n = 0; n < kCount / 4; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (n * 8 + e >= end || n * 8 + e < begin) scores[n * 4 + half * 2 + e] = -INFINITY;
    }
  }

  // scores → softmax weights relative to m. Moves m where a row's scores exceed it by too much; rescale()
  // must follow when o is at rest.
  template <int kCount>
  __device__ __forceinline__ void weigh(const AttentionArgs& a, float (&scores)[kCount]) {
    const float factor = kScores == Scores::kPlain ? a.score_factor : 1.0f;
    move_reference(scores, factor);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float m = finite_or_zero(m_[half]);
#pragma unroll
      for (int n = 0; n < kCount / 4; ++n)
#pragma unroll
        for (int i = n * 4 + half * 2; i < n * 4 + half * 2 + 2; ++i) {
          scores[i] = exp2f(fmaf(scores[i], factor, -m));
          d_[half] += scores[i];
        }
    }
  }

  // Takes the weights over for multiply_values.
  template <int kCount>
  __device__ __forceinline__ void keep(const float (&scores)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) weights_[i] = pack(scores[2 * i], scores[2 * i + 1]);
  }

  __device__ __forceinline__ void rescale() {
    if (!moved_) return;
#pragma unroll
    for (int i = 0; i < D / 2; ++i) o_[i] *= shrink_[i / 2 % 2];
  }

  // Writes the item's rows to the output or to its partial state.
  __device__ __forceinline__ void store(const AttentionArgs& a, const PrefillTask& task,
                                        const GroupDivider& divider) {
    const int rows = task.item.num_tokens * a.group;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float d = quad_sum(d_[half]);
      const int row = first_row_ + half * 8;
      if (task.item.state_row >= 0)
        store_state(a, task, row, rows, half, d);
      else
        store_output(a, task, divider, row, rows, half, d);
    }
  }

 __device__ __forceinline__ float (&accumulator()) [D / 2] { return o_; }

 private : using B = PrefillBuffers<D>;

  template <int kCount>
  __device__ __forceinline__ void move_reference(const float (&scores)[kCount], float factor) {
    bool grows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top[2] = {scores[half * 2], scores[half * 2 + 1]};
#pragma unroll
      for (int n = 1; n < kCount / 4; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) top[e] = fmaxf(top[e], scores[n * 4 + half * 2 + e]);
      const float highest = quad_max(fmaxf(top[0], top[1])) * factor;
      // A row that does not need it stays: its result does not depend on its neighbours.
      grows[half] = highest > m_[half] + kRescaleThreshold;
      const float m = grows[half] ? highest : m_[half];
      shrink_[half] = exp2f(m_[half] - finite_or_zero(m));
      m_[half] = m;
      d_[half] *= shrink_[half];
    }
    moved_ = __any_sync(0xffffffffu, grows[0] || grows[1]);
  }

  __device__ __forceinline__ void store_state(const AttentionArgs& a, const PrefillTask& task, int row,
                                              int rows, int half, float d) const {
    if (row >= rows) return;
    const int64_t state = static_cast<int64_t>(task.item.state_row + row) * a.num_kv_heads + task.head;
    if (threadIdx.x % 4 == 0) a.state_scales[state] = {m_[half], d};
    float* values = a.state_values + state * D + threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
      *reinterpret_cast<float2*>(values + n * 8) = {o_[n * 4 + half * 2], o_[n * 4 + half * 2 + 1]};
  }

  __device__ __forceinline__ void store_output(const AttentionArgs& a, const PrefillTask& task,
                                               const GroupDivider& divider, int row, int rows, int half,
                                               float d) const {
    const float inverse = d > 0.0f ? 1.0f / d : 0.0f;
    const int64_t token = task.item.first_token + divider.token(row);
    bf16* out = static_cast<bf16*>(a.out) +
                (token * a.num_q_heads + task.head * a.group + divider.head(row)) * D + threadIdx.x % 4 * 8;
#pragma unroll
    for (int n = 0; n < D / 8; n += 4) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = (n + i) * 4 + half * 2;
        pairs[i] = pack(o_[at] * inverse, o_[at + 1] * inverse);
      }
      transpose_quad(pairs);  // a lane then has 8 columns side by side
      if (row < rows) *reinterpret_cast<uint4*>(out + n * 8) = {pairs[0], pairs[1], pairs[2], pairs[3]};
    }
  }

  // Lane q of four gets value q of lane i as its value i.
  __device__ __forceinline__ static void transpose_quad(uint32_t (&x)[4]) {
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
      const bool upper = threadIdx.x & distance;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i & distance) continue;
        const uint32_t received = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + distance], distance);
        if (upper)
          x[i] = received;
        else
          x[i + distance] = received;
      }
    }
  }

  const int first_row_;
  int key_begin_[2], key_end_[2];  // what the rows see
  float o_[D / 2];
  float m_[2], d_[2];
  float shrink_[2];
  bool moved_ = false;
  uint32_t weights_[kTileKeys / 4];
};

// A multiplying warpgroup: attends the published items, its rows of each.
template <int D, Scores kScores>
class Multiplier {
 public:
  using B = PrefillBuffers<D>;
  using Rows = RowTile<D, kScores>;

  __device__ __forceinline__ Multiplier(const AttentionArgs& a, B& buffers, int index)
      : a_(a), buffers_(buffers), control_(buffers.control), index_(index), divider_(a.group) {}

  __device__ __forceinline__ void run() {
    if (index_ == 1) give_turn(turn(0));
    TaskReader tasks(control_);
    for (PrefillTask task = tasks.next(); task.head >= 0; task = tasks.next()) attend(task);
  }

 private:
  __device__ __forceinline__ void attend(const PrefillTask& task) {
    const WorkItem& item = task.item;
    Rows rows(a_, task, index_, divider_);
    const int first_token = min(divider_.token(index_ * kMultiplierRows), item.num_tokens - 1);
    // Tiles in [plain_begin, plain_end) are seen by every row.
    const int plain_begin = max(item.kv_begin, item.first_position + item.num_tokens - a_.window);
    const int plain_end = min(item.kv_end, item.first_position + first_token + 1);
    int key = task.first_key();
    const int last_key = key + (task.num_tiles() - 1) * kTileKeys;
    const bool is_last_narrow = item.kv_end - last_key <= kUnitKeys;
    const int last_wide_key = is_last_narrow ? last_key - kTileKeys : last_key;

    wait(shared_address(&control_.queries_full[index_]), queries_parity_);
    float narrow_scores[kUnitKeys / 2];
    if (key > last_wide_key) {
      begin(rows, narrow_scores, key);
    } else {
      float scores[kTileKeys / 2];
      begin(rows, scores, key);
      // A tile's weights become operands in the iteration after it: the compiler would wait for the product
      // before it weighs, were both in one.
      while (key < last_wide_key) {
        finish_tile(rows, scores);
        key += kTileKeys;
        if (key >= plain_begin && key + kTileKeys <= plain_end)
          add_tile<false>(rows, scores, key);
        else
          add_tile<true>(rows, scores, key);
      }
      finish_tile(rows, scores);
      if (is_last_narrow) add_tile<true>(rows, narrow_scores, last_key);
    }
    release(control_.queries_empty[index_]);
    queries_parity_ ^= 1;
    if (is_last_narrow) {
      finish_tile(rows, narrow_scores);
      multiply_last<kUnitKeys>(rows);
    } else {
      multiply_last<kTileKeys>(rows);
    }
    rows.wait_values();
    release_values();
    rows.store(a_, task, divider_);
  }

  // The weights of an item's first tile.
  template <int kCount>
  __device__ __forceinline__ void begin(Rows& rows, float (&scores)[kCount], int key) {
    wait(shared_address(&control_.keys_full[keys_.index]), keys_.parity);
    begin_products();
    Rows::multiply_keys(scores, queries(), keys());
    commit_products();
    wait_products<0>(scores);
    release_keys();
    Rows::cap(a_, scores);
    rows.mask(scores, key);
    rows.weigh(a_, scores);
  }

  // The weights of the next tile, beside the product with the values of the one before.
  template <bool kMasked, int kCount>
  __device__ __forceinline__ void add_tile(Rows& rows, float (&scores)[kCount], int key) {
    wait(shared_address(&control_.keys_full[keys_.index]), keys_.parity);
    await_turn(turn(index_));
    begin_products();
    Rows::multiply_keys(scores, queries(), keys());
    commit_products();
    wait(shared_address(&control_.values_full[values_.index]), values_.parity);
    begin_products();
    rows.template multiply_values<kTileKeys>(values());
    commit_products();
    give_turn(turn(1 - index_));
    is_product_pending_ = true;
    wait_products<1>(scores);
    release_keys();
    Rows::cap(a_, scores);
    if constexpr (kMasked) rows.mask(scores, key);
    rows.weigh(a_, scores);
  }

  // Ends the product of the tile before, and makes the tile's weights operands of its own.
  template <int kCount>
  __device__ __forceinline__ void finish_tile(Rows& rows, const float (&scores)[kCount]) {
    rows.wait_values();
    if (is_product_pending_) release_values();
    is_product_pending_ = false;
    rows.keep(scores);
    rows.rescale();
  }

  // Issues the product with the values of an item's last tile.
  template <int kKeys>
  __device__ __forceinline__ void multiply_last(Rows& rows) {
    wait(shared_address(&control_.values_full[values_.index]), values_.parity);
    begin_products();
    rows.template multiply_values<kKeys>(values());
    commit_products();
  }

  __device__ __forceinline__ uint32_t queries() const { return shared_address(buffers_.queries[index_]); }
  __device__ __forceinline__ uint32_t keys() const { return shared_address(buffers_.keys[keys_.index]); }
  __device__ __forceinline__ uint32_t values() const {
    return shared_address(buffers_.values[values_.index]);
  }

  // Each warp answers for its own part of the products.
  __device__ __forceinline__ static void release(uint64_t& empty) {
    if (threadIdx.x % 32 == 0) arrive(shared_address(&empty));
  }
  __device__ __forceinline__ void release_keys() {
    release(control_.keys_empty[keys_.index]);
    keys_.advance();
  }
  __device__ __forceinline__ void release_values() {
    release(control_.values_empty[values_.index]);
    values_.advance();
  }

  __device__ __forceinline__ static int turn(int index) { return 1 + index; }

  const AttentionArgs& a_;
  B& buffers_;
  typename B::Control& control_;
  const int index_;
  const GroupDivider divider_;
  uint32_t queries_parity_ = 0;
  bool is_product_pending_ = false;  // whose values are to be released
  Cursor<B::kStages> keys_;
  Cursor<B::kStages> values_;
};

template <int D, Scores kScores>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    prefill_wgmma_kernel(const __grid_constant__ AttentionArgs a, const __grid_constant__ CUtensorMap map) {
  if constexpr (kIsHopper) {
    extern __shared__ __align__(1024) uint8_t shared[];
    auto& buffers = *reinterpret_cast<PrefillBuffers<D>*>(shared);
    asm volatile("griddepcontrol.launch_dependents;");
    if (threadIdx.x == 0) {
      prefetch_map(map);
      buffers.control.init();
    }
    __syncthreads();
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
      shrink_registers<kLoaderRegisters>();
      load_all<D>(a, map, buffers);
    } else {
      grow_registers<kMultiplierRegisters>();
      Multiplier<D, kScores>(a, buffers, warpgroup - 1).run();
    }
  }
}

template <int D>
void launch_prefill_wgmma(const AttentionArgs& a, const CUtensorMap& map, int blocks, Scores scores,
                          cudaStream_t stream) {
  const auto kernel = scores == Scores::kPlain ? prefill_wgmma_kernel<D, Scores::kPlain>
                                               : prefill_wgmma_kernel<D, Scores::kSoftCap>;
  launch_kernel(Launch{kernel, dim3(blocks), kWgmmaThreads, sizeof(PrefillBuffers<D>)}, stream, a, map);
}

}  // namespace bequest
