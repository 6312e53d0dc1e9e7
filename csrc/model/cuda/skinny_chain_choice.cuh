// Which experts the row of skinny_chain.cu takes. Every CTA finds out for itself: to ask another one would
// take as long.
#pragma once

#include "device/exchange.cuh"
#include "device/reductions.cuh"
#include "model/cuda/skinny_chain.cuh"
#include "model/cuda/skinny_chain_rows.cuh"
#include "ops/cuda/expert_draw.cuh"

namespace bequest::cuda::chain {

inline constexpr int kQuad = 4;  // experts that follow each other lie in a lane: two words

// The router's logits, when they are there: lane l has those of experts 4 l to 4 l + 3, and of 128 further
// on. -inf where there is none.
template <int kPerLane>
__device__ __forceinline__ void load_logits(const Arguments& a, uint32_t launch, int lane,
                                            float (&x)[kPerLane]) {
#pragma unroll
  for (int i = 0; i < kPerLane; i += kQuad) {
    const int first = i * kWarp + lane * kQuad;
    const uint8_t* at = reinterpret_cast<const uint8_t*>(a.logits) + place_of_word(first / 2);
    uint4 words = make_uint4(0xff80ff80u, launch, 0xff80ff80u, launch);  // -inf
    Patience patience;
    while (first < a.num_experts) {
      words = load_words(at);
      if (words.y == launch && words.w == launch) break;
      patience.spend();
    }
    x[i] = __uint_as_float(words.x << 16);
    x[i + 1] = __uint_as_float(words.x & 0xffff0000u);
    x[i + 2] = __uint_as_float(words.z << 16);
    x[i + 3] = __uint_as_float(words.z & 0xffff0000u);
  }
}

// By one warp. As expert_route.cu chooses, by a softmax without bias or groups.
template <int kPerLane>
__device__ __forceinline__ void choose(const Arguments& a, LaunchNumber number, int lane, Chosen& chosen) {
  const auto expert_of = [lane](int i) { return i / kQuad * (kQuad * kWarp) + lane * kQuad + i % kQuad; };
  float x[kPerLane];
  load_logits<kPerLane>(a, number.get(), lane, x);
  float top = x[0];
#pragma unroll
  for (int i = 1; i < kPerLane; ++i) top = fmaxf(top, x[i]);
  top = warp_max(top);
  float total = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    x[i] = expert_of(i) < a.num_experts ? __expf(x[i] - top) : 0.0f;
    total += x[i];
  }
  total = warp_sum(total);
  uint32_t keys[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) keys[i] = expert_of(i) < a.num_experts ? key_of(x[i] / total) : kNoScore;
  Drawn mine{};
#pragma unroll 1
  for (int rank = 0; rank < a.num_chosen; ++rank) {
    const Drawn best = draw_best(keys, expert_of);
    if (lane == rank) mine = best;
  }
  float count = lane < a.num_chosen ? score_of(mine.key) : 0.0f;
  if (a.renormalises) count /= warp_sum(count) + 1e-20f;
  if (lane < a.num_chosen) {
    chosen.ids[lane] = mine.place;
    chosen.counts[lane] = count * a.factor;
  }
  __syncwarp();
  if (lane == 0) chosen.there.arrive();
}

}  // namespace bequest::cuda::chain
