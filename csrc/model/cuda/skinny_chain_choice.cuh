// Which experts the row of skinny_chain.cu takes. Every CTA finds out for itself: to ask another one would
// take as long.
#pragma once

#include "device/exchange.cuh"
#include "device/launch.cuh"
#include "device/reductions.cuh"
#include "model/cuda/skinny_chain.cuh"
#include "model/cuda/skinny_chain_draw.cuh"
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

// The router's logits, when they are there if it `waits`.
template <int kPerLane>
__device__ __forceinline__ void load_keys(const ChoiceView& view, uint32_t launch, int lane, bool waits,
                                          uint32_t (&keys)[kPerLane]) {
  constexpr int kQuads = kPerLane / kQuad;
  uint4 words[kQuads] = {};
  bool lacks_any;
  Patience patience;
  do {
    lacks_any = false;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int first = expert_at(i * kQuad, lane);
      if (first < view.num_experts && (words[i].y != launch || words[i].w != launch)) {
        words[i] = load_words(reinterpret_cast<const uint8_t*>(view.logits) + place_of_word(first / 2));
        lacks_any = true;
      }
    }
    patience.spend();
  } while (lacks_any && waits);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const uint4& quad = words[i / kQuad];
    const uint32_t pair = i % kQuad < 2 ? quad.x : quad.z;
    const int expert = expert_at(i, lane);
    keys[i] = expert < view.num_experts ? key_of_logit(i % 2 ? pair >> 16 : pair & 0xffffu, expert) : kNobody;
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
__device__ __forceinline__ float count_of_shared(const ChoiceView& view, uint32_t launch) {
  const uint8_t* at = reinterpret_cast<const uint8_t*>(view.logits) + place_of_word(view.num_experts / 2);
  uint4 words;
  Patience patience;
  for (;;) {
    words = load_words(at);
    if (words.y == launch) return 1.0f / (1.0f + __expf(-__uint_as_float(words.x << 16)));
    patience.spend();
  }
}

// The keys of the best, by id: lane l has that of rank l. In shared memory they are put in order.
template <int kPerLane>
__device__ __forceinline__ uint32_t draw_by_id(uint32_t (&keys)[kPerLane], int count, int lane, int* ids) {
  const uint32_t mine = draw(keys, count, lane);
  const int place = place_by_id(expert_of_key(mine), count);
  if (lane < count) ids[place] = static_cast<int>(mine);
  __syncwarp();
  return lane < count ? static_cast<uint32_t>(ids[lane]) : kNobody;
}

// As expert_route.cu chooses, by a softmax without bias or groups. foreseen: by bits, which of a lane's
// experts are; 0 in all lanes: nobody is. rehearses: with whatever is there, and tells nobody, so that the
// instructions have come when they are needed
template <int kPerLane>
__device__ __forceinline__ void choose(const ChoiceView& view, uint32_t launch, int lane, uint32_t foreseen,
                                       bool rehearses, ExpertFixed& fixed) {
  Chosen& chosen = fixed.chosen;
  uint32_t keys[kPerLane];
  load_keys<kPerLane>(view, launch, lane, !rehearses, keys);
  const float top = logit_of_key(best_of(keys)), total = view.renormalises ? 0.0f : total_of(keys, top);
  uint32_t mine;
  bool discards = false;
  const bool is_right = view.parts > 0 && are_best(foreseen, keys);
  if (is_right || rehearses) {  // nobody has to be drawn
    mine = key_of(keys, fixed.foreseen.ids[min(lane, view.num_chosen - 1)]);
  } else {
    mine = draw_by_id(keys, view.num_chosen, lane, chosen.ids);
    const bool is_ahead = lane >= view.first_ahead && lane <= view.last_ahead;
    discards = __any_sync(kAllLanes, is_ahead && fixed.foreseen.ids[lane] != expert_of_key(mine));
  }
  const bool has_one = lane < view.num_chosen;
  if (has_one) chosen.ids[lane] = expert_of_key(mine);
  if (lane == 0) chosen.discards = discards;
  __syncwarp();
  // Weights are asked for while it is found out what they count.
  if (lane == 0 && !rehearses) chosen.there.arrive();
  float count = has_one ? __expf(logit_of_key(mine) - top) : 0.0f;
  count /= view.renormalises ? warp_sum(count) : total;
  if (has_one) chosen.counts[lane] = count * view.factor;
  if (rehearses) return;
  if (lane == 0 && view.has_shared) chosen.counts[view.num_chosen] = count_of_shared(view, launch);
  __syncwarp();
  if (lane > 0) return;
  chosen.counted.arrive();
  if (view.num_read != nullptr) atomicAdd(view.num_read, static_cast<unsigned long long>(view.num_chosen));
}

// By the warp that chooses. Not a part of the kernel's code: those that multiply would lack registers.
template <int kPerLane>
__device__ __noinline__ void choose_experts(ExpertFixed& fixed, const uint32_t* launches) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  wait_for_previous();
  const uint32_t launch = __ldcg(launches) + 1;
  uint32_t foreseen = 0;
  if (fixed.choice.parts > 0) foreseen = foresee<kPerLane>(fixed.choice, launch, lane, fixed.foreseen);
#pragma unroll 1
  for (int turn = fixed.choice.parts > 0 ? 0 : 1; turn < 2; ++turn)
    choose<kPerLane>(fixed.choice, launch, lane, foreseen, turn == 0, fixed);
}

}  // namespace bequest::cuda::chain
