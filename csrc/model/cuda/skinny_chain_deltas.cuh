// What adapters add to the products of skinny_chain.cu: scale · B (A x), where each token has its own A and B
// (ops/cuda/lora.h).
//
// A's rows are tiles like those of a weight. The last CTAs, which have the fewest of the others, multiply
// them first; what comes of them is exchanged as results are, while all multiply the rest of the product. So
// nobody waits for it. B's row of an output is asked for before its sum is made.
#pragma once

#include "device/exchange.cuh"
#include "device/reductions.cuh"
#include "model/cuda/skinny_chain.cuh"
#include "ops/cuda/lora.h"

namespace bequest::cuda::chain {

inline constexpr int kMostDeltaParts = 3;                                // queries, keys and values
inline constexpr int kTokenShrunk = kMostDeltaParts * kMostChainedRank;  // [parts, ranks] of a token
inline constexpr int kDeltaPhases = 4;

// As all CTAs see it. Words [T, kTokenShrunk]: a sum of A x in float32, and the number of the launch.
struct Delta {
  LoraSite site;  // a null: nothing is added
  int tiles;      // of all tokens, at most one to a CTA
  uint64_t* words;
};

struct AdaptedArguments : Arguments {
  CUtensorMap a[kDeltaPhases];  // the rows of A of all slots
  Delta deltas[kDeltaPhases];
  const int32_t* slots;  // [T], -1: none
};

// A tile of A: 8 ranks of a token's adapter.
struct DeltaTile {
  int row;  // of all slots' A; -1: this CTA has none
  int word;
  int token;
  float scale;
};

// In shared memory; behind it shrunk [kDeltaPhases, T, kTokenShrunk] float32.
struct SharedDeltas {
  DeltaTile tiles[kDeltaPhases];
  int ranks[kDeltaPhases][kMostChainedRows][kMostDeltaParts];
  int ends[kDeltaPhases][kMostDeltaParts];
  int slots[kMostChainedRows];
};
static_assert(sizeof(SharedDeltas) % 16 == 0);

inline constexpr int delta_bytes(int num_tokens) {
  return static_cast<int>(sizeof(SharedDeltas)) + kDeltaPhases * num_tokens * kTokenShrunk * 4;
}

// Low ranks come first, so that those beyond an adapter's are with CTAs that have more to do.
__device__ __forceinline__ DeltaTile tile_of(const AdaptedArguments& a, const Delta& delta) {
  const int index = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  DeltaTile tile{-1, 0, 0, 0.0f};
  if (delta.site.a == nullptr || index >= delta.tiles) return tile;
  const int parts = static_cast<int>(delta.site.num_parts),
            most_rank = static_cast<int>(delta.site.most_rank);
  tile.token = index % a.num_tokens;
  const int rest = index / a.num_tokens, part = rest % parts, rank = rest / parts * kTile;
  const int slot = __ldcg(a.slots + tile.token);
  if (slot < 0 || rank >= __ldcg(delta.site.ranks + slot * parts + part)) return tile;
  tile.scale = __ldcg(delta.site.scales + slot * parts + part);
  tile.row = (slot * parts + part) * most_rank + rank;
  tile.word = tile.token * kTokenShrunk + part * kMostChainedRank + rank;
  return tile;
}

// Before the predecessor has ended: adapters and who has which were there before the step began. By the warps
// that multiply.
__device__ __forceinline__ void stage_ranks(const AdaptedArguments& a, SharedDeltas& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < a.num_tokens) shared.slots[thread] = __ldcg(a.slots + thread);
  constexpr int kOfPhase = kMostChainedRows * kMostDeltaParts;
  static_assert(kDeltaPhases * kOfPhase <= kConsumers);
  if (thread >= a.num_phases * kOfPhase) return;
  const int phase = thread / kOfPhase, token = thread % kOfPhase / kMostDeltaParts,
            part = thread % kMostDeltaParts;
  const LoraSite& site = a.deltas[phase].site;
  const bool exists = site.a != nullptr && part < site.num_parts;
  int rank = 0;
  if (exists && token < a.num_tokens) {
    const int slot = __ldcg(a.slots + token);
    if (slot >= 0) rank = __ldcg(site.ranks + slot * site.num_parts + part);
  }
  shared.ranks[phase][token][part] = rank;
  if (token == 0) shared.ends[phase][part] = exists ? site.ends[part] : 0;
}

// B's row of one output of a token: its first 16 ranks are asked for early.
class DeltaRow {
 public:
  __device__ __forceinline__ void ask(const LoraSite& site, const SharedDeltas& shared, int phase, int token,
                                      int output) {
    part_ = 0;
    while (part_ + 1 < kMostDeltaParts && output >= shared.ends[phase][part_]) ++part_;
    rank_ = shared.ranks[phase][token][part_];
    if (rank_ == 0) return;
    chunk_bytes_ = site.out_features * kLoraRanks * 2;
    const int64_t chunk = int64_t{shared.slots[token]} * (site.most_rank / kLoraRanks);
    row_ = static_cast<const uint8_t*>(site.b) + chunk * chunk_bytes_ + int64_t{output} * (kLoraRanks * 2);
    load(row_, first_);
  }

  // shrunk: of the phase
  __device__ __forceinline__ float times(const float* shrunk, int token) const {
    if (rank_ == 0) return 0.0f;
    const float* x = shrunk + token * kTokenShrunk + part_ * kMostChainedRank;
    float sum = dot(first_, x);
#pragma unroll 1
    for (int rank = kLoraRanks; rank < rank_; rank += kLoraRanks) {
      uint4 b[2];
      load(row_ + rank / kLoraRanks * chunk_bytes_, b);
      sum += dot(b, x + rank);
    }
    return sum;
  }

 private:
  __device__ __forceinline__ static void load(const uint8_t* from, uint4 (&b)[2]) {
    b[0] = __ldcg(reinterpret_cast<const uint4*>(from));
    b[1] = __ldcg(reinterpret_cast<const uint4*>(from) + 1);
  }

  __device__ __forceinline__ static float dot(const uint4 (&b)[2], const float* x) {
    float sums[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t words[4] = {b[half].x, b[half].y, b[half].z, b[half].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[half] += __uint_as_float(words[i] << 16) * x[half * 8 + 2 * i];
        sums[half] += __uint_as_float(words[i] & 0xffff0000u) * x[half * 8 + 2 * i + 1];
      }
    }
    return sums[0] + sums[1];
  }

  int part_ = 0, rank_ = 0;
  int64_t chunk_bytes_ = 0;
  const uint8_t* row_ = nullptr;
  uint4 first_[2];
};

// What is added to an element's output, and to that of up. Without adapters nothing is.
template <bool kDeltas>
class ElementDelta {};

template <>
class ElementDelta<true> {
 public:
  // up_output: -1: there is none
  __device__ __forceinline__ void ask(const LoraSite& site, const SharedDeltas& shared, int phase, int token,
                                      int output, int up_output) {
    if (site.a == nullptr) return;
    row_.ask(site, shared, phase, token, output);
    if (up_output >= 0) up_.ask(site, shared, phase, token, up_output);
  }
  __device__ __forceinline__ float output(const float* shrunk, int token) const {
    return row_.times(shrunk, token);
  }
  __device__ __forceinline__ float up(const float* shrunk, int token) const {
    return up_.times(shrunk, token);
  }

 private:
  DeltaRow row_, up_;
};

// What adapters add in a phase, as one CTA sees it. Without adapters there is nothing to do.
template <int T, class A>
class PhaseDeltas {
 public:
  __device__ PhaseDeltas(const A&, SharedDeltas&, int) {}

  __device__ static constexpr bool has_tile() { return false; }
  __device__ int token() const { return 0; }
  __device__ void publish(const float*, float, LaunchNumber, int) const {}
  template <class Element>
  __device__ void ask(Element&, const View&) const {}
  __device__ void collect(LaunchNumber, int) const {}
  __device__ const float* shrunk() const { return nullptr; }
};

template <int T>
class PhaseDeltas<T, AdaptedArguments> {
 public:
  __device__ __forceinline__ PhaseDeltas(const AdaptedArguments& a, SharedDeltas& shared, int phase)
      : delta_(a.deltas[phase]), shared_(shared), phase_(phase) {}

  __device__ __forceinline__ bool has_tile() const { return shared_.tiles[phase_].row >= 0; }
  __device__ __forceinline__ int token() const { return shared_.tiles[phase_].token; }

  // What the tile's rows have come to. parts: as Element::store has them; scale: of the norm
  __device__ __forceinline__ void publish(const float* parts, float scale, LaunchNumber launch,
                                          int thread) const {
    const DeltaTile& tile = shared_.tiles[phase_];
    if (thread >= kTile) return;
    const float* part = parts + tile.token * (kWarps * kPartPitch) + thread;
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += part[warp * kPartPitch];
    const uint32_t bits = __float_as_uint(sum * scale * tile.scale);
    store_relaxed(delta_.words + tile.word + thread, uint64_t{launch.get()} << 32 | bits);
  }

  template <class Element>
  __device__ __forceinline__ void ask(Element& element, const View& view) const {
    element.ask(view, delta_.site, shared_, phase_);
  }

  // All that the tiles of the phase have published, to shared memory, when it is there.
  __device__ __forceinline__ void collect(LaunchNumber number, int thread) const {
    const uint32_t launch = number.get();
    float* const to = shrunk();
#pragma unroll 1
    for (int i = thread; i < T * kTokenShrunk; i += kConsumers) {
      const int token = i / kTokenShrunk, part = i % kTokenShrunk / kMostChainedRank;
      if (i % kMostChainedRank >= shared_.ranks[phase_][token][part]) continue;
      uint64_t word;
      Patience patience;
      do {
        word = load_relaxed(delta_.words + i);
        patience.spend();
      } while (word >> 32 != launch);
      to[i] = __uint_as_float(static_cast<uint32_t>(word));
    }
  }

  // [T, kTokenShrunk]
  __device__ __forceinline__ float* shrunk() const {
    return reinterpret_cast<float*>(&shared_ + 1) + phase_ * T * kTokenShrunk;
  }

 private:
  const Delta& delta_;
  SharedDeltas& shared_;
  const int phase_;
};

}  // namespace bequest::cuda::chain
