// The attention of a step's only token, from its projected row to the result, in one launch.
//
// Between the product ahead and the one behind a single token has little to do, and what there is to wait for
// is one launch after another. So this kernel does what prepare_qkv, decode and merge do apart. A head's keys
// are dealt to the warps of a cluster of thread blocks, step by step; keys and values of tokens before this
// one are read while the product ahead still runs. Each block norms and rotates the head's queries for
// itself; the one whose warp has the last step makes the new key and value too, stores them in the cache and
// puts them into that step. Then the blocks send each other their states: each gets a part of the columns
// from everybody and writes their result.
#pragma once

#include <algorithm>
#include <bit>

#include "attention/cuda/decode_warp.cuh"
#include "attention/cuda/single_token.h"
#include "attention/cuda/single_token_heads.cuh"
#include "device/barriers.cuh"
#include "device/cluster.cuh"
#include "device/copies.cuh"
#include "device/launch.cuh"
#include "device/pairs.cuh"
#include "device/reductions.cuh"
#include "device/shared_memory.cuh"

namespace bequest::cuda {

inline constexpr int kMostParts = 16;     // blocks of a cluster
inline constexpr int kFewestParts = 2;    // one would be no cluster
inline constexpr int kPortableParts = 8;  // that any chip with clusters can have

template <int D, class Cache>
struct SingleShape {
  static constexpr int kStages = D == 64 ? 4 : 2;
  static constexpr int kStageBytes = DecodeShape<D, Cache>::kStageBytes;
  static constexpr int kWarpBytes = kStages * kStageBytes;
  static constexpr int kRingBytes = kDecodeWarps * kWarpBytes;
  static constexpr int kStepKeys = DecodeStep<D, Cache>::kKeys;
  static constexpr int kRowVectors = D / 4;  // float4 of a row

  // The queries [group, kQueryPitch] follow the ring, then the states that come from all blocks: group * D
  // floats, and the scales of each four of them.
  static constexpr int kRowBytes =
      kQueryPitch<D> * 2 + D * 4 + kRowVectors * static_cast<int>(sizeof(float2));
  static constexpr int bytes(int group) { return kRingBytes + group * kRowBytes; }
};

// Where the token's keys are and who has which.
template <int D, class Cache>
struct SingleRange {
  int begin, position;  // the keys [begin, position], the last being the token's own
  int first;            // where the first step begins
  int round;            // keys from a warp's step to its next, a power of two
  bool stores;          // the last key and value are new, not in the cache yet

  __device__ SingleRange(const AttentionArgs& a, const QkvParams& p)
      : position(__ldg(p.positions)), stores(__ldg(p.slots) >= 0) {
    constexpr int kStepKeys = SingleShape<D, Cache>::kStepKeys;
    begin = max(0, position - a.window + 1);
    first = begin / kStepKeys * kStepKeys;
    round = keys_of_round();
  }
  __device__ static int keys_of_round() {
    return static_cast<int>(gridDim.x) * kDecodeWarps * SingleShape<D, Cache>::kStepKeys;
  }

  // The first key of this warp's first step, and how far that is behind `first`.
  __device__ int first_of(int warp) const { return first + offset_of(warp); }
  __device__ static int offset_of(int warp) {
    return (static_cast<int>(blockIdx.x) * kDecodeWarps + warp) * SingleShape<D, Cache>::kStepKeys;
  }
  // Whether a warp of this block has the last key.
  __device__ bool has_last() const {
    constexpr int kBlockKeys = kDecodeWarps * SingleShape<D, Cache>::kStepKeys;
    return ((position - first) & (round - 1)) / kBlockKeys == static_cast<int>(blockIdx.x);
  }
  __device__ int end_in_cache() const { return position + (stores ? 0 : 1); }
};

// The blocks of a warp's first steps. Where all keys are seen these do not depend on the position, and are
// asked for beside it.
template <int D, class Cache>
struct FirstBlocks {
  using Copier = StepCopier<D, Cache>;
  static constexpr int kStages = SingleShape<D, Cache>::kStages;
  typename Copier::Blocks of[kStages];

  __device__ FirstBlocks(const AttentionArgs& a, const Copier& copier, int warp) {
    if (!sees_all(a)) return;
#pragma unroll
    for (int s = 0; s < kStages; ++s)
      of[s] = copier.likely_blocks_of(
          a.block_tables, SingleRange<D, Cache>::offset_of(warp) + s * SingleRange<D, Cache>::keys_of_round(),
          static_cast<int>(a.max_blocks));
  }

  // first: of this warp's first step
  __device__ void settle(const AttentionArgs& a, const Copier& copier, const SingleRange<D, Cache>& range,
                         int first) {
    const int end = range.position + 1;
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      const int token = first + s * range.round;
      if (token >= end) continue;
      if (sees_all(a))
        Copier::settle(of[s], token, end);
      else
        of[s] = copier.blocks_of(a.block_tables, token, end);
    }
  }

 private:
  __device__ static bool sees_all(const AttentionArgs& a) { return a.window >= INT_MAX / 2; }
};

// The new key and value into their row of a step. By a warp.
template <int D, class Cache>
__device__ void put_own(const typename SingleHeads<D, Cache>::Memory& memory, uint32_t stage, int row,
                        int lane) {
  using Step = DecodeStep<D, Cache>;
  constexpr int kChunks = Step::kRowBytes / 16;
  for (int i = lane; i < 2 * kChunks; i += 32) {
    const int kind = i / kChunks, chunk = i % kChunks;
    store_16(stage + kind * DecodeShape<D, Cache>::kTileBytes + Step::offset(row, chunk),
             reinterpret_cast<const uint4*>(memory.own[kind])[chunk]);
  }
}

struct MergedVector {
  float4 o;
  float2 scale;  // {m, d}
};

// Four columns of a row, from the states of the block's warps.
template <int D, class Cache>
__device__ MergedVector merge_warps(const uint8_t* rings, const float2 (&scales)[kDecodeWarps][kDecodeRows],
                                    int row, int column) {
  float m = -INFINITY;
#pragma unroll
  for (int w = 0; w < kDecodeWarps; ++w) m = fmaxf(m, scales[w][row].x);
  MergedVector merged{{}, {m, 0.0f}};
  float4& o = merged.o;
#pragma unroll
  for (int w = 0; w < kDecodeWarps; ++w) {
    const float factor = exp2f(scales[w][row].x - finite_or_zero(m));
    const auto* tile = reinterpret_cast<const float*>(rings + w * SingleShape<D, Cache>::kWarpBytes);
    const float4 part = *reinterpret_cast<const float4*>(
        tile + row * D + WarpState<D, Cache, Scores::kPlain>::swizzled(row, column));
    o = {o.x + factor * part.x, o.y + factor * part.y, o.z + factor * part.z, o.w + factor * part.w};
    merged.scale.y += factor * scales[w][row].y;
  }
  return merged;
}

// What the blocks of a cluster send each other: block r gets the vectors r, r + parts, ... from everybody. A
// barrier counts the bytes, so that nobody waits for more than its own.
class StateExchange {
 public:
  // `memory`: float4 [vectors], then float2 [vectors]; it and `barrier` at the same place in every block.
  __device__ StateExchange(uint8_t* memory, PhaseBarrier& barrier, int vectors)
      : log2_parts_(static_cast<int>(std::bit_width(gridDim.x)) - 1),
        vectors_(vectors),
        values_(reinterpret_cast<float4*>(memory)),
        scales_(reinterpret_cast<float2*>(values_ + vectors)),
        barrier_(barrier) {}

  // By one thread, before all blocks meet.
  __device__ void expect() const {
    barrier_.init(1);
    publish_barriers();
    barrier_.arrive_expecting(vectors_ * static_cast<int>(sizeof(float4) + sizeof(float2)));
  }

  // After all blocks have met.
  __device__ void send(int vector, const MergedVector& merged) const {
    const int to = vector & (parts() - 1), place = (vector >> log2_parts_) * parts() + rank();
    const uint32_t barrier = address_in_block(barrier_.address(), to);
    send_async(address_in_block(shared_address(values_ + place), to), merged.o, barrier);
    send_async(address_in_block(shared_address(scales_ + place), to), merged.scale, barrier);
  }

  // Calls f(vector, merged) for this block's vectors, in one lane each. By the whole block.
  template <class F>
  __device__ void for_each_merged(F&& f) const {
    barrier_.wait(0);
    // Neighbouring lanes have the parts of a vector, in the order of the blocks, each of them two.
    for (int first = static_cast<int>(threadIdx.x) / 32 * 64; first < vectors_; first += kDecodeWarps * 64) {
      const int place = first + static_cast<int>(threadIdx.x) % 32 * 2;
      const MergedVector merged = merge_parts(place);
      if (place < vectors_ && (place & (parts() - 1)) == 0)
        f((place >> log2_parts_) * parts() + rank(), merged);
    }
  }

 private:
  __device__ static int parts() { return static_cast<int>(gridDim.x); }
  __device__ static int rank() { return static_cast<int>(blockIdx.x); }

  __device__ MergedVector merge_parts(int place) const {
    MergedVector own[2] = {{{}, {-INFINITY, 0.0f}}, {{}, {-INFINITY, 0.0f}}};
    if (place < vectors_)
#pragma unroll
      for (int i = 0; i < 2; ++i) own[i] = {values_[place + i], scales_[place + i]};
    const int lanes = parts() / 2;
    float m = fmaxf(own[0].scale.x, own[1].scale.x);
#pragma unroll
    for (int step = 1; step < kMostParts / 2; step *= 2) {
      const float other = __shfl_xor_sync(kAllLanes, m, step);
      if (step < lanes) m = fmaxf(m, other);
    }
    float sums[5] = {};
#pragma unroll
    for (const MergedVector& part : own) {
      const float factor = exp2f(part.scale.x - finite_or_zero(m));
      const float values[5] = {part.o.x, part.o.y, part.o.z, part.o.w, part.scale.y};
#pragma unroll
      for (int i = 0; i < 5; ++i) sums[i] += values[i] * factor;
    }
#pragma unroll
    for (int step = 1; step < kMostParts / 2; step *= 2)
#pragma unroll
      for (float& sum : sums) {
        const float other = __shfl_xor_sync(kAllLanes, sum, step);
        if (step < lanes) sum += other;
      }
    return {{sums[0], sums[1], sums[2], sums[3]}, {m, sums[4]}};
  }

  const int log2_parts_, vectors_;
  float4* const values_;
  float2* const scales_;
  PhaseBarrier& barrier_;
};

// Writes this block's vectors of the head's rows. By the whole block.
template <int D>
__device__ void write_merged(const AttentionArgs& a, const StateExchange& exchange, int head) {
  bf16* const rows = static_cast<bf16*>(a.out) + static_cast<int64_t>(head) * a.group * D;
  exchange.for_each_merged([&](int vector, const MergedVector& merged) {
    const int q_head = head * a.group + vector * 4 / D;
    const float factor = output_factor(a, q_head, merged.scale.x, merged.scale.y) * a.value_scale;
    const float4& o = merged.o;
    *reinterpret_cast<uint2*>(rows + vector * 4) = {pack(o.x * factor, o.y * factor),
                                                    pack(o.z * factor, o.w * factor)};
  });
}

template <int D, class Cache>
__device__ __forceinline__ void read_queries(QueryRows<D, Cache>& rows, const BFloat16* queries, int group,
                                             int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + half * 8;
    const auto* query = reinterpret_cast<const bf16*>(queries) + row * kQueryPitch<D>;
    DecodeStep<D, Cache>::read_query(rows.q, half, row < group ? query : nullptr, lane);
  }
}

// A warp's steps from `first` on, whose first copies are on their way into the ring. `with_own`: the token's
// own key and value, which are not in the cache yet, belong to this block.
template <int D, class Cache>
__device__ __forceinline__ void attend_range(const AttentionArgs& a, SingleRange<D, Cache> range,
                                             const StepCopier<D, Cache>& copier, const WorkItem& item,
                                             WarpState<D, Cache, Scores::kPlain>& state,
                                             const typename SingleHeads<D, Cache>::Memory& memory,
                                             bool with_own, uint32_t ring_address, int first, int lane) {
  using S = SingleShape<D, Cache>;
  const int end = range.position + 1;
  int stage = 0, later = first + S::kStages * range.round;
  // A step ahead of their use, so that copies never wait for the block table.
  typename StepCopier<D, Cache>::Blocks next{};
  if (later < end) next = copier.blocks_of(a.block_tables, later, end);
  for (int token = first; token < end; token += range.round, later += range.round) {
    const uint32_t address = ring_address + stage * S::kStageBytes;
    wait_copies<S::kStages - 1>();
    __syncwarp();
    if (with_own && range.position < token + S::kStepKeys) {
      put_own<D, Cache>(memory, address, range.position - token, lane);
      __syncwarp();
    }
    state.add_step(a, item, token, address, token == first);
    __syncwarp();
    if (later < end) copier.copy(address, next, later, range.begin, range.end_in_cache());
    commit_copies();
    if (later + range.round < end) next = copier.blocks_of(a.block_tables, later + range.round, end);
    stage = stage + 1 == S::kStages ? 0 : stage + 1;
  }
  wait_copies<0>();
}

// `early`: the keys before the token's own were in the cache before the kernel ahead began.
template <int D, class Cache>
__global__ void __launch_bounds__(kDecodeWarps * 32, D <= 128 ? 3 : 1)
    single_token_kernel(const __grid_constant__ AttentionArgs a, const __grid_constant__ QkvParams p,
                        bool early) {
  using S = SingleShape<D, Cache>;
  using Copier = StepCopier<D, Cache>;
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ float2 scales[kDecodeWarps][kDecodeRows];
  __shared__ typename SingleHeads<D, Cache>::Memory memory;
  __shared__ PhaseBarrier received;
  let_next_start();
  const int num_items = __ldg(a.num_items);
  const SingleRange<D, Cache> range(a, p);  // on its way beside the number: both come from far
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;
  const Copier copier(a, lane, head);
  FirstBlocks<D, Cache> blocks(a, copier, warp);
  if (num_items == 0) return wait_for_previous();  // padding
  const int vectors = a.group * S::kRowVectors;
  const StateExchange exchange(shared + S::kRingBytes + a.group * (kQueryPitch<D> * 2), received, vectors);
  if (threadIdx.x == 0) exchange.expect();
  arrive_in_cluster();  // before a block sends, all have begun

  const int end = range.position + 1;
  uint8_t* const ring = shared + warp * S::kWarpBytes;
  const uint32_t ring_address = shared_address(ring);
  const int first = range.first_of(warp);
  blocks.settle(a, copier, range, first);
  if (!early) wait_for_previous();
#pragma unroll
  for (int s = 0; s < S::kStages; ++s) {
    const int token = first + s * range.round;
    if (token < end)
      copier.copy(ring_address + s * S::kStageBytes, blocks.of[s], token, range.begin, range.end_in_cache());
    commit_copies();
  }
  const bool with_own = range.stores && range.has_last();
  SingleHeads<D, Cache> heads(p, head, a.group, with_own, warp, lane);
  if (early) wait_for_previous();

  auto* const queries = reinterpret_cast<BFloat16*>(shared + S::kRingBytes);
  heads.make(queries, memory);
  __syncthreads();
  QueryRows<D, Cache> rows;
  read_queries<D, Cache>(rows, queries, a.group, lane);
  const WorkItem item{0, 0, 1, range.position, range.begin, end, ResultPlace::output(), MaybeIndex::none()};
  WarpState<D, Cache, Scores::kPlain> state(a, item, rows, head, lane);
  attend_range<D, Cache>(a, range, copier, item, state, memory, with_own, ring_address, first, lane);
  state.store(reinterpret_cast<float*>(ring), scales[warp], a.group);
  __syncthreads();

  await_cluster();
  for (int i = threadIdx.x; i < vectors; i += kDecodeWarps * 32)
    exchange.send(i, merge_warps<D, Cache>(shared, scales, i / S::kRowVectors, i % S::kRowVectors * 4));
  write_merged<D>(a, exchange, head);
}

// Of the kernel, with as many queries to a head as there can be.
template <int D, class Cache>
constexpr int most_single_token_bytes() {
  return SingleShape<D, Cache>::bytes(kDecodeRows) +
         static_cast<int>(sizeof(float2[kDecodeWarps][kDecodeRows]) +
                          sizeof(typename SingleHeads<D, Cache>::Memory) + sizeof(PhaseBarrier));
}

// Blocks of a cluster: so many that the heads fill the device, as far as that many heads find room at once.
template <class Kernel>
int single_token_parts(Kernel kernel, int heads, int multiprocessors, LaunchShape shape) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  int parts =
      std::bit_floor(static_cast<unsigned>(std::clamp(multiprocessors / heads, kFewestParts, kMostParts)));
  for (; parts > kPortableParts; parts /= 2) {
    shape.grid = dim3(parts, heads);
    shape.cluster = parts;
    if (clusters_at_once(kernel, shape) >= heads) break;
  }
  return parts;
}

template <int D, class Cache>
void launch_single_token(const AttentionArgs& a, const QkvParams& p, int multiprocessors, Stream stream) {
  static_assert(D > 128 || most_single_token_bytes<D, Cache>() <= kSingleTokenBytes);
  const auto kernel = single_token_kernel<D, Cache>;
  LaunchShape shape{.grid = {},
                    .block = kDecodeWarps * 32,
                    .shared_bytes = static_cast<size_t>(SingleShape<D, Cache>::bytes(a.group)),
                    .overlaps_previous = true};
  shape.cluster = single_token_parts(kernel, a.num_kv_heads, multiprocessors, shape);
  shape.grid = dim3(shape.cluster, a.num_kv_heads);
  launch(kernel, shape, stream, a, p, is_captured(stream));
}

}  // namespace bequest::cuda
