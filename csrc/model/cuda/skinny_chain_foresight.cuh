// Which experts the row of skinny_chain.cu is likely to take, known before the router has spoken: the
// residual that it looks at is linear in what attention gives, and the factor of a norm does not change who
// is best.
//   Wr diag(g) (residual + Wo attended) = F [attended | residual]
// So F is multiplied first, before the output product and its exchange. Its pieces are stages of tiles, one
// to a CTA: sums of parts of k are exchanged, and who draws adds them up.
//
// What is asked for by it is right but for near ties, and the first round of gate and up is multiplied before
// the router has spoken. Results depend on the router alone: where it chooses others, that round begins
// again. So it does not matter that another CTA may have added to the residual already when this one reads
// it.
#pragma once

#include "device/exchange.cuh"
#include "device/reductions.cuh"
#include "model/cuda/skinny_chain.cuh"
#include "model/cuda/skinny_chain_draw.cuh"
#include "model/cuda/skinny_chain_results.cuh"
#include "model/cuda/skinny_chain_rows.cuh"
#include "model/cuda/skinny_chain_sums.cuh"
#include "model/cuda/skinny_chain_weights.cuh"

namespace bequest::cuda::chain {

// --- F [attended | residual] ----------------------------------------------------------------------------

// Two sums of 24 bits each and 16 bits of the launch's number, so that who draws has half as much to read. No
// result depends on them: a number that comes again can spoil a guess at most.
__device__ __forceinline__ uint2 pair_of_sums(float first, float second, uint32_t launch) {
  const uint32_t low = __float_as_uint(first), high = __float_as_uint(second);
  return {low >> 8 | (high & 0xff00u) << 16, high >> 16 | launch << 16};
}
__device__ __forceinline__ float first_of_pair(uint32_t x) { return __uint_as_float(x << 8); }
__device__ __forceinline__ float second_of_pair(uint32_t x, uint32_t y) {
  return __uint_as_float(__byte_perm(x, y, 0x5433));  // its last byte counts nothing
}
__device__ __forceinline__ bool is_of_launch(uint32_t y, uint32_t launch) {
  return (y ^ launch << 16) < 0x10000u;
}

// By the warps that multiply, whose x is staged.
__device__ __forceinline__ void multiply_pieces(const Foresight& f, RingEnd<Form::kNumbers>& ring,
                                                uint32_t x_at, RoundSums<1>& sums, LaunchNumber launch) {
  constexpr uint32_t kBytes = kStageBytesOfX<Form::kNumbers>;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
#pragma unroll 1
  for (int index = Piece::first(); index < f.pieces; index += static_cast<int>(gridDim.x)) {
    const Piece piece = Piece::of(f, index);
    multiply_pairs(ring, 1, piece.count, x_at + piece.begin * kBytes, lane % 4 == 0, sums.place(warp, lane));
    sync_consumers();
    const float* const parts = sums.turn();
    if (thread >= kTile) continue;
    const float total = sum_of_warps([&](int of) { return parts[of * kPartPitch + thread]; });
    const float next = __shfl_down_sync((1u << kTile) - 1, total, 1);
    if (thread % 2 != 0) continue;
    const uint2 word = pair_of_sums(total, next, launch.get());
    store_word(word_at(f.words, (piece.part * f.rows + piece.row + thread) / 2), word.x, word.y);
  }
}

// --- who is foreseen ------------------------------------------------------------------------------------

// Larger sums have larger keys. The last byte says whose it is.
__device__ __forceinline__ uint32_t key_of_sum(float sum, int expert) {
  static_assert(kMostRouted <= 256);
  const auto bits = __float_as_uint(sum), sign = static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31);
  const uint32_t ordered = bits ^ (sign | 0x80000000u);
  return (ordered & 0xffffff00u) | (255u - static_cast<uint32_t>(expert));
}

// Sums of all parts, when they are there if it `waits`: lane l has those of experts 4 l to 4 l + 3, and of
// 128 further on.
template <int kPerLane>
__device__ __forceinline__ void load_sums(const ChoiceView& view, uint32_t launch, int lane, bool waits,
                                          float (&sums)[kPerLane]) {
  const int parts = view.parts, rows = (view.num_experts + kTile - 1) / kTile * kTile;
  const auto* const from = reinterpret_cast<const uint8_t*>(view.sums);
  constexpr int kQuads = kPerLane / kQuad, kAtOnce = most_sum_parts(kPerLane);
#pragma unroll 1
  for (int part = 0; part < parts; part += kAtOnce) {  // once, but for long rows
    uint4 words[kAtOnce][kQuads] = {};
    bool lacks[kAtOnce][kQuads], lacks_any;
#pragma unroll
    for (int p = 0; p < kAtOnce; ++p)
#pragma unroll
      for (int i = 0; i < kQuads; ++i) lacks[p][i] = part + p < parts && expert_at(kQuad * i, lane) < rows;
    Patience patience;
    do {
#pragma unroll
      for (int p = 0; p < kAtOnce; ++p)
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
          const int word = ((part + p) * rows + expert_at(kQuad * i, lane)) / 2;
          if (lacks[p][i]) words[p][i] = load_words(from + place_of_word(word));
        }
      lacks_any = false;
#pragma unroll
      for (int p = 0; p < kAtOnce; ++p)
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
          const bool is_there = is_of_launch(words[p][i].y, launch) && is_of_launch(words[p][i].w, launch);
          lacks[p][i] = lacks[p][i] && !is_there;
          lacks_any |= lacks[p][i];
        }
      patience.spend();
    } while (lacks_any && waits);
#pragma unroll
    for (int p = 0; p < kAtOnce; ++p)
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        const uint4& own = words[p][i];
        sums[kQuad * i] += first_of_pair(own.x);
        sums[kQuad * i + 1] += second_of_pair(own.x, own.y);
        sums[kQuad * i + 2] += first_of_pair(own.z);
        sums[kQuad * i + 3] += second_of_pair(own.z, own.w);
      }
  }
}

// Experts of the mask, of all lanes, in the order of their ids. A lane has four of each 128, so that how many
// come before them is found out by ballots.
template <int kPerLane>
__device__ __forceinline__ void store_by_id(uint32_t mask, int lane, int* ids) {
  const uint32_t before = (1u << lane) - 1;
  int begin = 0;
#pragma unroll
  for (int first = 0; first < kPerLane; first += kQuad) {
    uint32_t own = mask >> first & ((1u << kQuad) - 1);
    const int count = __popc(own);
    const uint32_t ones = __ballot_sync(kAllLanes, count & 1), twos = __ballot_sync(kAllLanes, count & 2),
                   fours = __ballot_sync(kAllLanes, count & 4);
    int place = begin + __popc(ones & before) + 2 * __popc(twos & before) + 4 * __popc(fours & before);
    begin += __popc(ones) + 2 * __popc(twos) + 4 * __popc(fours);
#pragma unroll 1
    for (; own != 0; own &= own - 1) ids[place++] = expert_at(first, lane) + __ffs(own) - 1;
  }
}

// By the warp that chooses. Which of a lane's experts they are, by bits. It happens once to whatever is
// there, and is no result then: when the sums are, the instructions have come, which takes longer than to run
// them.
template <int kPerLane>
__device__ __forceinline__ uint32_t foresee(const ChoiceView& view, uint32_t launch, int lane,
                                            Foreseen& foreseen) {
  uint32_t mask;
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn) {
    float sums[kPerLane] = {};
    load_sums<kPerLane>(view, launch, lane, turn > 0, sums);
    uint32_t keys[kPerLane], left[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int expert = expert_at(i, lane);
      left[i] = keys[i] = expert < view.num_experts ? key_of_sum(sums[i], expert) : kNobody;
    }
    const uint32_t mine = draw(left, view.num_chosen, lane);
    const uint32_t worst = __shfl_sync(kAllLanes, mine, view.num_chosen - 1);
    mask = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) mask |= keys[i] >= worst ? 1u << i : 0u;
    store_by_id<kPerLane>(mask, lane, foreseen.ids);
    __syncwarp();
  }
  if (lane == 0) foreseen.there.arrive();
  return mask;
}

// Whether the keys of those in the mask are the best of the warp's.
template <int kPerLane>
__device__ __forceinline__ bool are_best(uint32_t mask, const uint32_t (&keys)[kPerLane]) {
  uint32_t worst = ~0u, best = kNobody;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (mask >> i & 1)
      worst = min(worst, keys[i]);
    else
      best = max(best, keys[i]);
  }
  return __reduce_min_sync(kAllLanes, worst) > __reduce_max_sync(kAllLanes, best);
}

}  // namespace bequest::cuda::chain
