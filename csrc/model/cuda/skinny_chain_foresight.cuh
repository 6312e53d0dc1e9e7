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

// By the warps that multiply, whose x is staged.
__device__ __forceinline__ void multiply_pieces(const Foresight& f, RingEnd<Form::kNumbers>& ring,
                                                uint32_t x_at, RoundSums<1>& sums, LaunchNumber launch) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
#pragma unroll 1
  for (int index = Piece::first(); index < f.pieces; index += static_cast<int>(gridDim.x)) {
    const Piece piece = Piece::of(f, index);
    TileSum sum;
#pragma unroll 1
    for (int chunk = piece.begin; chunk < piece.begin + piece.count; ++chunk) {
      Weights<Form::kNumbers> weights;
      Row<Form::kNumbers> x;
      ring.take(weights);
      x.load(x_at + chunk * kStageBytesOfX<Form::kNumbers>);
      sum.add(weights, x);
      ring.give_back(weights);
    }
    if (lane % 4 == 0) *sums.place(warp, lane) = sum.total();
    sync_consumers();
    const float* const parts = sums.turn();
    if (thread >= kTile) continue;
    const float total = sum_of_warps([&](int of) { return parts[of * kPartPitch + thread]; });
    store_word(word_at(f.words, piece.part * f.rows + piece.row + thread), __float_as_uint(total),
               launch.get());
  }
}

// --- who is foreseen ------------------------------------------------------------------------------------

// Larger sums have larger keys. The last byte says whose it is.
__device__ __forceinline__ uint32_t key_of_sum(float sum, int expert) {
  static_assert(kMostRouted <= 256);
  const uint32_t bits = __float_as_uint(sum), ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  return (ordered & 0xffffff00u) | (255u - static_cast<uint32_t>(expert));
}

// Sums of all parts, when they are there: lane l has those of experts 4 l to 4 l + 3, and of 128 further on.
template <int kPerLane>
__device__ __forceinline__ void load_sums(const ChoiceView& view, uint32_t launch, int lane,
                                          float (&sums)[kPerLane]) {
  const int parts = view.parts, rows = (view.num_experts + kTile - 1) / kTile * kTile;
  const auto* const from = reinterpret_cast<const uint8_t*>(view.sums);
  constexpr int kPairs = kPerLane / 2, kAtOnce = most_sum_parts(kPerLane);
#pragma unroll 1
  for (int part = 0; part < parts; part += kAtOnce) {  // once, but for long rows
    uint4 words[kAtOnce][kPairs] = {};
    bool lacks_any;
    Patience patience;
    do {
      lacks_any = false;
#pragma unroll
      for (int p = 0; p < kAtOnce; ++p)
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          const int expert = expert_at(2 * i, lane);
          const bool exists = part + p < parts && expert < rows;
          const uint8_t* at = from + place_of_word((part + p) * rows + expert);
          if (exists && (words[p][i].y != launch || words[p][i].w != launch)) {
            words[p][i] = load_words(at);
            lacks_any = true;
          }
        }
      patience.spend();
    } while (lacks_any);
#pragma unroll
    for (int p = 0; p < kAtOnce; ++p)
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        sums[2 * i] += __uint_as_float(words[p][i].x);
        sums[2 * i + 1] += __uint_as_float(words[p][i].z);
      }
  }
}

// By the warp that chooses. Which of a lane's experts they are, by bits.
template <int kPerLane>
__device__ __forceinline__ uint32_t foresee(const ChoiceView& view, uint32_t launch, int lane,
                                            Foreseen& foreseen) {
  float sums[kPerLane] = {};
  load_sums<kPerLane>(view, launch, lane, sums);
  uint32_t keys[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = expert_at(i, lane);
    keys[i] = expert < view.num_experts ? key_of_sum(sums[i], expert) : kNobody;
  }
  const auto expert_of = [](uint32_t key) { return static_cast<int>(255u - (key & 255u)); };
  uint32_t mask = 0;
  const uint32_t mine =
      draw(keys, view.num_chosen, lane, [&](uint32_t key) { mask |= 1u << index_of(expert_of(key)); });
  const int id = expert_of(mine), place = place_by_id(id, view.num_chosen);
  if (lane < view.num_chosen) foreseen.ids[place] = id;
  __syncwarp();
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
