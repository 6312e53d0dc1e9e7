// Which experts the row of skinny_chain.cu takes. Every CTA finds out for itself: to ask another one would
// take as long.
#pragma once

#include "device/exchange.cuh"
#include "device/reductions.cuh"
#include "model/cuda/skinny_chain.cuh"
#include "model/cuda/skinny_chain_foresight.cuh"
#include "model/cuda/skinny_chain_rows.cuh"

namespace bequest::cuda::chain {

// The bits of a bfloat16 logit in the upper half, so that larger keys are better; NaN is the worst. In the
// lower half is who it is of: of equal ones the smaller expert is better, and no two keys are equal.
__device__ __forceinline__ uint32_t key_of_logit(uint32_t bits, int expert) {
  const uint32_t ordered = bits & 0x8000u ? ~bits & 0xffffu : bits | 0x8000u;
  const bool is_nan = (bits & 0x7fffu) > 0x7f80u;
  return (is_nan ? 0u : ordered << 16) | (0xffffu - static_cast<uint32_t>(expert));
}
__device__ __forceinline__ int expert_of_key(uint32_t key) {
  return static_cast<int>(0xffffu - (key & 0xffffu));
}
__device__ __forceinline__ float logit_of_key(uint32_t key) {
  const uint32_t ordered = key >> 16;
  return __uint_as_float((ordered & 0x8000u ? ordered & 0x7fffu : ~ordered & 0xffffu) << 16);
}

// The router's logits, when they are there: lane l has those of experts 4 l to 4 l + 3, and of 128 further
// on.
template <int kPerLane>
__device__ __forceinline__ void load_keys(const Arguments& a, uint32_t launch, int lane,
                                          uint32_t (&keys)[kPerLane]) {
#pragma unroll
  for (int i = 0; i < kPerLane; i += kQuad) {
    const int first = i * kWarp + lane * kQuad;
    const uint8_t* at = reinterpret_cast<const uint8_t*>(a.logits) + place_of_word(first / 2);
    uint4 words = make_uint4(0, 0, 0, 0);
    Patience patience;
    while (first < a.num_experts) {
      words = load_words(at);
      if (words.y == launch && words.w == launch) break;
      patience.spend();
    }
    const uint32_t bits[kQuad] = {words.x & 0xffffu, words.x >> 16, words.z & 0xffffu, words.z >> 16};
#pragma unroll
    for (int j = 0; j < kQuad; ++j)
      keys[i + j] = first < a.num_experts ? key_of_logit(bits[j], first + j) : kNobody;
  }
}

// The sum of all e^(logit - top).
template <int kPerLane>
__device__ __forceinline__ float total_of(const uint32_t (&keys)[kPerLane], float top) {
  float total = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) total += keys[i] != kNobody ? __expf(logit_of_key(keys[i]) - top) : 0.0f;
  return warp_sum(total);
}

// What the expert of every row counts.
__device__ __forceinline__ float count_of_shared(const Arguments& a, uint32_t launch) {
  const uint8_t* at = reinterpret_cast<const uint8_t*>(a.logits) + place_of_word(a.num_experts / 2);
  uint4 words;
  Patience patience;
  for (;;) {
    words = load_words(at);
    if (words.y == launch) return 1.0f / (1.0f + __expf(-__uint_as_float(words.x << 16)));
    patience.spend();
  }
}

// By one warp. As expert_route.cu chooses, by a softmax without bias or groups.
template <int kPerLane>
__device__ __forceinline__ void choose(const Arguments& a, LaunchNumber number, int lane, Fixed& fixed) {
  Chosen& chosen = fixed.chosen;
  const RanksAhead ahead(a, fixed.views[Order<true>::kGate]);
  uint32_t keys[kPerLane];
  load_keys<kPerLane>(a, number.get(), lane, keys);
  uint32_t all[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) all[i] = keys[i];
  const uint32_t mine = draw(keys, a.num_chosen, lane);
  const int id = expert_of_key(mine), place = place_by_id(id, a.num_chosen);
  const bool discards = ahead.differ(fixed.foreseen, lane < a.num_chosen, id, place);
  if (lane == 0) chosen.discards = discards;
  if (lane < a.num_chosen) {  // weights are asked for while it is found out what they count
    chosen.ids[place] = id;
    chosen.there.arrive();
  }
  const float top = logit_of_key(__shfl_sync(kAllLanes, mine, 0));
  float count = lane < a.num_chosen ? __expf(logit_of_key(mine) - top) : 0.0f;
  count /= a.renormalises ? warp_sum(count) : total_of(all, top);
  if (lane < a.num_chosen) chosen.counts[place] = count * a.factor;
  if (a.num_read != nullptr && blockIdx.x == 0 && lane == 0)
    atomicAdd(a.num_read, static_cast<unsigned long long>(a.num_chosen));
  if (a.has_shared && lane == 0) chosen.counts[a.num_chosen] = count_of_shared(a, number.get());
}

}  // namespace bequest::cuda::chain
