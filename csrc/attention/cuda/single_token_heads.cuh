// The heads of a step's only token, between its projected row and single_token.cuh.
#pragma once

#include <type_traits>

#include "attention/cuda/decode_warp.cuh"
#include "device/reductions.cuh"
#include "ops/cuda/qkv_heads.cuh"

namespace bequest::cuda {

// Elements from one query in shared memory to the next: eight rows that are read at once lie in different
// banks.
template <int D>
inline constexpr int kQueryPitch = D + 8;

// The head's queries, and the token's key and value where this block has them to make. By the whole block.
template <int D, class Cache>
class SingleHeads {
 public:
  using Stored = std::conditional_t<std::is_same_v<Cache, Bf16Cache>, BFloat16, Float8>;
  struct Memory {
    float staged[kDecodeWarps][D];
    __align__(16) Stored own[2][D];  // the token's key and value as the cache has them
  };

  // Reads what came before any kernel of the step, and finds out where the rest is. with_own: key and value
  // are to be made
  __device__ SingleHeads(const QkvParams& p, int head, int group, bool with_own, int warp, int lane)
      : p_(p),
        head_(head),
        group_(group),
        count_(group + (with_own ? 2 : 0)),
        warp_(warp),
        lane_(lane),
        angles_(p, 0, lane, p.rotary_dim == D),
        key_(first_key(p, __ldg(p.slots))) {
    find(warp);
    if (p.q_weight == nullptr) return;
    load_head<BFloat16, E, true>(static_cast<const BFloat16*>(p.q_weight), lane, D, weight_[0]);
    load_head<BFloat16, E, true>(static_cast<const BFloat16*>(p.k_weight), lane, D, weight_[1]);
  }

  // Leaves the queries at `queries` [group, kQueryPitch].
  __device__ void make(BFloat16* queries, Memory& memory) {
    if (count_ <= kDecodeWarps) return make_some<1>(warp_, queries, memory);
    if (count_ <= 2 * kDecodeWarps) return make_some<2>(warp_, queries, memory);
    for (int first = warp_; first < count_; first += kAtOnce * kDecodeWarps) {
      if (first != warp_) find(first);
      make_some<kAtOnce>(first, queries, memory);
    }
  }

 private:
  static constexpr int E = D / kWarp;  // of a lane
  static constexpr int kAtOnce = 3;    // of eight queries, key and value: no warp has more

  __device__ Head head_of(int index) const {
    if (index < group_) return {HeadKind::kQuery, head_ * group_ + index};
    return {index == group_ ? HeadKind::kKey : HeadKind::kValue, head_};
  }

  // Where every fourth head from `first` on is read.
  __device__ void find(int first) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      sources_[i] = source_of<BFloat16>(p_, 0, head_of(min(first + i * kDecodeWarps, count_ - 1)));
  }

  // kHeads of them side by side: a head alone is a row of latencies.
  template <int kHeads>
  __device__ __forceinline__ void make_some(int first, BFloat16* queries, Memory& memory) {
    float x[kHeads][E] = {};
#pragma unroll
    for (int i = 0; i < kHeads; ++i)
      if (first + i * kDecodeWarps < count_) load_head<BFloat16, E, true>(sources_[i], lane_, D, x[i]);
    const auto is_value = [&](int i) { return first + i * kDecodeWarps == group_ + 1; };
    if (p_.q_weight != nullptr) norm(x, [&](int i) { return first + i * kDecodeWarps == group_; }, is_value);
    if (p_.cos_sin != nullptr) {
      float* const staged = memory.staged[warp_];
      p_.rotary_dim == D ? turn(x, true, staged, is_value) : turn(x, false, staged, is_value);
    }
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int index = first + i * kDecodeWarps;
      if (index < count_) leave(head_of(index), queries + index * kQueryPitch<D>, memory, x[i]);
    }
  }

  // Values stay as they are.
  template <int kHeads, class IsKey, class IsValue>
  __device__ __forceinline__ void norm(float (&x)[kHeads][E], const IsKey& is_key,
                                       const IsValue& is_value) const {
    float squares[kHeads] = {};
#pragma unroll
    for (int i = 0; i < kHeads; ++i)
#pragma unroll
      for (const float each : x[i]) squares[i] += each * each;
    warp_sums(squares);
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const float scale = rsqrtf(squares[i] / static_cast<float>(D) + p_.eps);
#pragma unroll
      for (int e = 0; e < E; ++e) {
        const float weight = (is_key(i) ? weight_[1][e] : weight_[0][e]) + p_.weight_offset;
        const float y = rounded<BFloat16>(x[i][e] * scale * weight);
        if (!is_value(i)) x[i][e] = y;
      }
    }
  }

  // The same of the rotation. halves: as rotate() has it
  template <int kHeads, class IsValue>
  __device__ __forceinline__ void turn(float (&x)[kHeads][E], bool halves, float* staged,
                                       const IsValue& is_value) const {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      float y[E];
#pragma unroll
      for (int e = 0; e < E; ++e) y[e] = x[i][e];
      rotate<E>(angles_, static_cast<int>(p_.rotary_dim) / 2, halves, lane_, staged, y);
#pragma unroll
      for (int e = 0; e < E; ++e)
        if (!is_value(i)) x[i][e] = y[e];
    }
  }

  __device__ __forceinline__ void leave(const Head& head, BFloat16* query, Memory& memory, float (&x)[E]) {
    if (head.kind == HeadKind::kQuery) {
      // Read as late as this: few models have it, and all would hold the register.
      if (p_.query_scales != nullptr) scale_head(__ldg(p_.query_scales + __ldg(p_.positions)), x);
      return store_head<BFloat16, E, true>(query, lane_, D, x);
    }
    store_cached<Stored, E, true>(p_, head, key_, lane_, x);
    store_head<Stored, E, true>(memory.own[head.kind == HeadKind::kValue], lane_, D, x);
  }

  const QkvParams& p_;
  const int head_, group_, count_;  // count: of heads to make
  const int warp_, lane_;
  const BFloat16* sources_[kAtOnce];
  const Angles<E> angles_;
  const int64_t key_;  // where the token's key of head 0 is stored, if it has a place
  float weight_[2][E];
};

}  // namespace bequest::cuda
