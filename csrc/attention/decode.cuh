// Attention of tiles of at most 16 rows, where reading the keys and values is all the cost.
//
// A thread block is four warps that do not wait for each other while they read: each owns a quarter
// (kStepKeys keys) of every unit, a private ring of kStages such steps in shared memory, and a private
// softmax state. The ring runs on over the ends of items, so that memory stays busy while an item is
// finished. At its end the four states meet in the ring slots the warps have just emptied (a step's keys and
// values are exactly the bytes of a 16 × D float tile) and become the output or the item's partial state.
#pragma once

#include <cuda_runtime.h>

#include "attention/device_args.cuh"
#include "attention/launch.cuh"
#include "attention/tensor_core.cuh"

namespace bequest {

inline constexpr int kStepKeys = 16;
inline constexpr int kDecodeWarps = 4;
static_assert(kStepKeys * kDecodeWarps == kUnitKeys);

template <int D>
struct DecodeShape {
  static constexpr int kRowBytes = D * 2;
  static constexpr int kTileBytes = kStepKeys * kRowBytes;  // of keys; the values follow
  static constexpr int kStageBytes = 2 * kTileBytes;
  static constexpr int kStages = D == 64 ? 6 : 3;
  static constexpr int kWarpBytes = kStages * kStageBytes;
  static constexpr int kBlockBytes = kDecodeWarps * kWarpBytes;
};

// The tickets this thread block has drawn, in order. Readers ask first, each at its own time: the one that
// finds a ticket undrawn draws it for all.
class TicketRing {
 public:
  // At most this many tickets lie between the slowest user of the ring and the fastest: a step per stage.
  static constexpr int kAhead = 7;
  static constexpr int kSlots = 16;

  __device__ TicketRing(const Tickets& tickets, int* slots) : tickets_(tickets), slots_(slots) {
    if (threadIdx.x < kSlots) slots_[threadIdx.x] = threadIdx.x == 0 ? tickets_.first() : kUndrawn;
    __syncthreads();
  }

  // The n-th ticket of this block, -1: there are no more. By a whole warp.
  __device__ int get(int n) const {
    int ticket = 0;
    if (threadIdx.x % 32 == 0) {
      volatile int* slot = slots_ + n % kSlots;
      if (*slot == kUndrawn && atomicCAS(slots_ + n % kSlots, kUndrawn, kDrawing) == kUndrawn) {
        slots_[(n + kAhead + 1) % kSlots] = kUndrawn;
        *slot = tickets_.draw();
      }
      do ticket = *slot;
      while (ticket == kDrawing);
    }
    return __shfl_sync(0xffffffffu, ticket, 0);
  }

 private:
  static constexpr int kUndrawn = -2, kDrawing = -3;
  const Tickets& tickets_;
  int* const slots_;
};

// Issues the copies of one warp's steps, item after item.
template <int D>
class StepReader {
 public:
  __device__ StepReader(const AttentionArgs& a, const TicketRing& ring, int warp, int lane)
      : a_(a), ring_(ring), warp_(warp), lane_(lane) {
    enter_item();
  }

  // One group of copies, empty where the item has no key for this warp, and behind the last item.
  __device__ void read_step(uint32_t stage) {
    if (unit_ < unit_end_) {
      if (token() < end_) copy_step(stage);
      unit_ += kUnitKeys;
      if (unit_ >= unit_end_)
        enter_item();
      else if (token() < end_)
        fetch_blocks();
    }
    commit_copies();
  }

 private:
  using S = DecodeShape<D>;
  static_assert(S::kStages < TicketRing::kAhead);
  static constexpr int kChunks = D / 8;  // per row
  static constexpr int kRowsPerCopy = 32 / kChunks;
  static constexpr int kCopies = kStepKeys / kRowsPerCopy;

  __device__ int token() const { return unit_ + warp_ * kStepKeys; }

  __device__ void enter_item() {
    unit_ = unit_end_ = 0;
    const int ticket = ring_.get(num_items_++);
    if (ticket < 0) return;
    const WorkItem item = load_item(a_.items, ticket / a_.num_kv_heads);
    keys_ =
        static_cast<const bf16*>(a_.keys) + static_cast<int64_t>(ticket % a_.num_kv_heads) * a_.head_stride;
    table_ = a_.block_tables + item.sequence * a_.max_blocks;
    begin_ = item.kv_begin;
    end_ = unit_end_ = item.kv_end;
    unit_ = item.kv_begin / kUnitKeys * kUnitKeys;
    if (token() < end_) fetch_blocks();
  }

  // A step ahead of their use, so that the copies never wait for the block table.
  __device__ void fetch_blocks() {
    blocks_[0] = __ldg(table_ + (token() >> a_.log2_block_size));
    blocks_[1] = __ldg(table_ + (min(token() + 8, end_ - 1) >> a_.log2_block_size));
  }

  __device__ void copy_step(uint32_t stage) {
    const int chunk = lane_ % kChunks;
    const int lane_row = lane_ / kChunks;
    const bf16* sources[2];
    for (int half = 0; half < 2; ++half)
      sources[half] = keys_ + blocks_[half] * a_.block_stride +
                      ((token() + half * 8) & (a_.block_size - 1)) * D + lane_row * D + chunk * 8;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int row = i * kRowsPerCopy + lane_row;
      const bf16* source = sources[i / (kCopies / 2)] + i % (kCopies / 2) * kRowsPerCopy * D;
      // Slots without a key the item sees may hold anything, NaN included: they become zeros.
      const bool valid = token() + row >= begin_ && token() + row < end_;
      const uint32_t destination = stage + tile_offset<D>(row, chunk);
      copy_16_async(destination, source, valid);
      copy_16_async(destination + S::kTileBytes, source + a_.values_after_keys, valid);
    }
  }

  const AttentionArgs& a_;
  const TicketRing& ring_;
  const int warp_, lane_;
  const bf16* keys_ = nullptr;
  const int32_t* table_ = nullptr;
  int num_items_ = 0;            // entered so far
  int unit_ = 0, unit_end_ = 0;  // first key of the next unit to read; where units end
  int begin_ = 0, end_ = 0;      // keys of the item
  int blocks_[2] = {0, 0};       // of rows 0-7 and 8-15 of the step
};

// One warp's softmax state of 16 rows. A lane holds rows lane / 4 + {0, 8}: m[half], d[half] (its own
// columns' part).
template <int D, bool kSoftCap>
class WarpState {
 public:
  __device__ WarpState(const AttentionArgs& a, const WorkItem& item, int head, int lane) : lane_(lane) {
    const int rows = item.num_rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + half * 8;
      const int token = row / a.group;
      position_[half] = item.first_position + min(token, item.num_tokens - 1);
      const bf16* q = static_cast<const bf16*>(a.q) + (item.first_token + token) * a.q_stride +
                      (head * a.group + row % a.group) * D + lane % 4 * 2;
#pragma unroll
      for (int k = 0; k < D / 16; ++k) {
        q_[k][half] = row < rows ? *reinterpret_cast<const uint32_t*>(q + k * 16) : 0;
        q_[k][half + 2] = row < rows ? *reinterpret_cast<const uint32_t*>(q + k * 16 + 8) : 0;
      }
    }
  }

  // Adds the keys [token, token + 16) of the item, whose tiles are at `stage`.
  __device__ void add_step(const AttentionArgs& a, const WorkItem& item, int token, uint32_t stage) {
    float scores[2][4] = {};
    const uint32_t keys = stage + lane_offset_columns_first<D>(lane_);
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      uint32_t b[4];
      load_matrices(b, keys ^ (k * 32));
      multiply_accumulate(scores[0], q_[k], b[0], b[1]);
      multiply_accumulate(scores[1], q_[k], b[2], b[3]);
    }
    weigh(a, item, token, scores);
    const uint32_t weights[4] = {pack(scores[0][0], scores[0][1]), pack(scores[0][2], scores[0][3]),
                                 pack(scores[1][0], scores[1][1]), pack(scores[1][2], scores[1][3])};
    const uint32_t values = stage + DecodeShape<D>::kTileBytes + lane_offset_rows_first<D>(lane_);
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
      uint32_t b[4];
      load_matrices_transposed(b, values ^ (n * 32));
      multiply_accumulate(o_[2 * n], weights, b[0], b[1]);
      multiply_accumulate(o_[2 * n + 1], weights, b[2], b[3]);
    }
  }

  // Leaves o at `tile` [16, D] and {m, d} at scales[16]. Columns are swizzled: see swizzled().
  __device__ void store(float* tile, float2* scales, int rows) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane_ / 4 + half * 8;
      const float d = quad_sum(d_[half]);
      if (row >= rows) continue;
      if (lane_ % 4 == 0) scales[row] = {m_[half], d};
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        float* target = tile + row * D + swizzled(row, n * 8 + lane_ % 4 * 2);
        *reinterpret_cast<float2*>(target) = {o_[n][half * 2], o_[n][half * 2 + 1]};
      }
    }
  }

  // Spreads the four rows that a half-warp writes at once over all banks.
  __device__ static int swizzled(int row, int column) { return column ^ ((row & 3) << 3); }

 private:
  // scores → softmax weights, relative to m.
  __device__ void weigh(const AttentionArgs& a, const WorkItem& item, int token, float (&scores)[2][4]) {
    float highest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = token + n * 8 + lane_ % 4 * 2 + (e & 1);
        const int position = position_[e >> 1];
        const bool seen =
            key >= item.kv_begin && key < item.kv_end && key <= position && key > position - a.window;
        const float score = seen ? score_in_log2<kSoftCap>(scores[n][e], a) : -INFINITY;
        scores[n][e] = score;
        highest[e >> 1] = fmaxf(highest[e >> 1], score);
      }
    highest[0] = quad_max(highest[0]);
    highest[1] = quad_max(highest[1]);
    const bool grows = highest[0] > m_[0] + kRescaleThreshold || highest[1] > m_[1] + kRescaleThreshold;
    if (__any_sync(0xffffffffu, grows)) rescale(highest);
#pragma unroll
    for (int n = 0; n < 2; ++n)
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
  int position_[2];
  uint32_t q_[D / 16][4];
  float o_[D / 8][4] = {};
  float m_[2] = {-INFINITY, -INFINITY};
  float d_[2] = {0.0f, 0.0f};
};

// Merges the warps' states of an item and writes the rows. By the whole block.
template <int D>
__device__ void finish_item(const AttentionArgs& a, const WorkItem& item, int head,
                            float* const (&tiles)[kDecodeWarps],
                            const float2 (&scales)[kDecodeWarps][kDecodeRows]) {
  for (int i = threadIdx.x; i < item.num_rows * (D / 4); i += kDecodeWarps * 32) {
    const int row = i / (D / 4);
    const int column = i % (D / 4) * 4;
    float m = -INFINITY;
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) m = fmaxf(m, scales[w][row].x);
    float4 o{};
    float d = 0.0f;
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) {
      const float factor = exp2f(scales[w][row].x - finite_or_zero(m));
      const auto& part =
          *reinterpret_cast<const float4*>(tiles[w] + row * D + WarpState<D, false>::swizzled(row, column));
      o = {o.x + factor * part.x, o.y + factor * part.y, o.z + factor * part.z, o.w + factor * part.w};
      d += factor * scales[w][row].y;
    }
    if (item.state_row >= 0) {
      const int64_t state = static_cast<int64_t>(item.state_row + row) * a.num_kv_heads + head;
      *reinterpret_cast<float4*>(a.state_values + state * D + column) = o;
      if (column == 0) a.state_scales[state] = {m, d};
    } else {
      const float inverse = d > 0.0f ? 1.0f / d : 0.0f;
      const int64_t token = item.first_token + row / a.group;
      bf16* out =
          static_cast<bf16*>(a.out) + (token * a.num_q_heads + head * a.group + row % a.group) * D + column;
      *reinterpret_cast<uint2*>(out) = {pack(o.x * inverse, o.y * inverse),
                                        pack(o.z * inverse, o.w * inverse)};
    }
  }
}

template <int D, bool kSoftCap>
__global__ void __launch_bounds__(kDecodeWarps * 32, attention_blocks_per_sm(D))
    decode_kernel(const __grid_constant__ AttentionArgs a) {
  using S = DecodeShape<D>;
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ float2 scales[kDecodeWarps][kDecodeRows];
  __shared__ int ticket_slots[TicketRing::kSlots];
  // The merge may take its place beside this grid and wait there.
  asm volatile("griddepcontrol.launch_dependents;");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Tickets tickets(a);
  const TicketRing ring(tickets, ticket_slots);
  const auto slot = [&](int owner, int stage) {
    return shared + owner * S::kWarpBytes + stage * S::kStageBytes;
  };

  StepReader<D> reader(a, ring, warp, lane);
#pragma unroll
  for (int s = 0; s < S::kStages; ++s) reader.read_step(shared_address(slot(warp, s)));
  int stage = 0, held = -1;  // the step to take next; the step whose slot waits to be filled again
  for (int n = 0;; ++n) {
    const int ticket = ring.get(n);
    if (ticket < 0) break;
    const WorkItem item = load_item(a.items, ticket / a.num_kv_heads);
    const int head = ticket % a.num_kv_heads;
    WarpState<D, kSoftCap> state(a, item, head, lane);
    for (int unit = item.kv_begin / kUnitKeys * kUnitKeys; unit < item.kv_end; unit += kUnitKeys) {
      if (held >= 0) reader.read_step(shared_address(slot(warp, held)));
      wait_copies<S::kStages - 1>();
      __syncwarp();
      const int token = unit + warp * kStepKeys;
      if (token < item.kv_end) state.add_step(a, item, token, shared_address(slot(warp, stage)));
      __syncwarp();
      held = stage;
      stage = stage + 1 == S::kStages ? 0 : stage + 1;
    }
    state.store(reinterpret_cast<float*>(slot(warp, held)), scales[warp], item.num_rows);
    __syncthreads();
    float* tiles[kDecodeWarps];  // all warps have taken the same number of steps
    for (int w = 0; w < kDecodeWarps; ++w) tiles[w] = reinterpret_cast<float*>(slot(w, held));
    finish_item<D>(a, item, head, tiles, scales);
    __syncthreads();
  }
  if (threadIdx.x == 0) tickets.finish();
}

template <int D>
void launch_decode(const AttentionArgs& a, int blocks, bool soft_cap, cudaStream_t stream) {
  const auto kernel = soft_cap ? decode_kernel<D, true> : decode_kernel<D, false>;
  launch_kernel(Launch{kernel, dim3(blocks), kDecodeWarps * 32, DecodeShape<D>::kBlockBytes}, stream, a);
}

}  // namespace bequest
