// What becomes of the sums of a phase of skinny_chain.cu.
#pragma once

#include "device/reductions.cuh"
#include "device/vectors.cuh"
#include "model/cuda/skinny_chain.cuh"
#include "model/cuda/skinny_chain_deltas.cuh"
#include "model/cuda/skinny_chain_rows.cuh"
#include "ops/cuda/activation.cuh"
#include "ops/cuda/hidden_tap.cuh"

namespace bequest::cuda::chain {

// Out of the way of the code that every step runs through.
__device__ __noinline__ void rarely_tap(const HiddenTap& tap, int token, int hidden, int output,
                                        BFloat16 value) {
  if (BFloat16* row = tap_row<BFloat16>(tap, token, hidden)) row[output] = value;
}

// In pairs, for the latency; always in the same order.
template <class Of>
__device__ __forceinline__ float sum_of_warps(const Of& of) {
  float sums[kWarps];
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sums[warp] = of(warp);
#pragma unroll
  for (int distance = kWarps / 2; distance > 0; distance /= 2)
#pragma unroll
    for (int warp = 0; warp < distance; ++warp) sums[warp] += sums[warp + distance];
  return sums[0];
}

// What the norm of a token's x comes to; 1 without one. squares: [kMostChainedRows, kWarps]
__device__ __forceinline__ float norm_scale(const View& view, const float (*squares)[kWarps], int token) {
  if (view.gain < 0) return 1;
  const float square = sum_of_warps([&](int warp) { return squares[token][warp]; });
  return rsqrtf(square / static_cast<float>(view.units * kUnit) + view.eps);
}

// A thread's element of a round: [kMostChainedRows, kPlaces] of them.
template <Form kForm, bool kDeltas>
class Element {
 public:
  // Asks for what is added. tile, count: of the round; leading: as the view has it
  __device__ __forceinline__ Element(const View& view, int num_tokens, int tile, int count, int thread,
                                     int leading) {
    token_ = thread / kPlaces;
    place_ = thread % kPlaces;
    const bool gated = view.kind == Kind::kGate;
    const int row = place_ % kTile;
    const int own = gate_tile_at(tile_at<kForm>(tile + place_ / kTile), view.first, leading);
    output_ = own * (gated ? kTile / 2 : kTile) + row;
    exists_ = token_ < num_tokens && place_ < count * kTile && output_ < view.outputs &&
              !(gated && row >= kTile / 2);
    const int at = token_ * view.outputs + output_;
    out_ = exists_ && view.out != nullptr ? view.out + at : nullptr;
    to_ = exists_ && view.to != nullptr && output_ % 2 == 0 ? word_at(view.to, at / 2) : nullptr;
    if (!exists_) return;
    if (view.bias != nullptr) {
      bias_ = view.bias[output_];
      if (gated) other_ = view.bias[output_ + view.outputs];
    }
    if constexpr (kForm == Form::kInt4) scale_ = other_scale_ = 1 / kBesideCodes;
    if constexpr (kForm == Form::kFloat8 || is_fine(kForm)) {
      scale_ = __ldg(view.scales + output_) / kBesideCodes;
      if (gated) other_scale_ = __ldg(view.scales + output_ + view.outputs) / kBesideCodes;
    }
    // Stored by this very thread where this launch has stored it.
    if (view.kind == Kind::kAdd) other_ = {__ldcg(reinterpret_cast<const uint16_t*>(out_))};
  }

  // Asks for what adapters need.
  __device__ __forceinline__ void ask(const View& view, const LoraSite& site, const SharedDeltas& shared,
                                      int phase) {
    const int up = view.kind == Kind::kGate ? output_ + view.outputs : -1;
    if (exists_) delta_.ask(site, shared, phase, token_, output_, up);
  }

  // parts: [T, kWarps, kPartPitch], the warps' sums; squares: [kMostChainedRows, kWarps];
  // counts: of experts, whose results a gated product has; or null; shrunk: of what was asked for
  __device__ __forceinline__ void store(const View& view, Activation activation, const float* parts,
                                        const float (*squares)[kWarps], LaunchNumber launch,
                                        const HiddenTap& tap, const float* counts,
                                        const float* shrunk) const {
    const float* part = parts + token_ * (kWarps * kPartPitch) + place_;
    const float scale = norm_scale(view, squares, token_);
    float y = total(part) * (scale * scale_) + widen(bias_);
    if constexpr (kDeltas) y += delta_.output(shrunk, token_);
    y = rounded<BFloat16>(y);
    if (view.kind == Kind::kGate) {
      float up = total(part + kTile / 2) * (scale * other_scale_) + widen(other_);
      if constexpr (kDeltas) up += delta_.up(shrunk, token_);
      up = rounded<BFloat16>(up);
      y = gate(activation, y, up);
      if (counts != nullptr && exists_) y *= counts[output_ / view.part];
    } else {
      y += widen(other_);
    }
    const BFloat16 value = narrow<BFloat16>(y);
    const uint32_t neighbour = __shfl_down_sync(kAllLanes, uint32_t{value.bits}, 1);
    if (to_ != nullptr) store_word(to_, neighbour << 16 | value.bits, launch.get());
    if (out_ != nullptr) *out_ = value;
    if (view.is_tapped && exists_) rarely_tap(tap, token_, view.outputs, output_, value);
  }

 private:
  __device__ __forceinline__ static float total(const float* part) {
    return sum_of_warps([&](int warp) { return part[warp * kPartPitch]; });
  }

  int token_, place_, output_;
  bool exists_;
  Word* to_;       // null: the neighbour stores it, or nobody
  BFloat16* out_;  // or null
  // As they come: who converts them waits for them. Other: what is added, or the bias of up.
  BFloat16 bias_{}, other_{};
  float scale_ = 1, other_scale_ = 1;  // of the row's codes, and of up's
  ElementDelta<kDeltas> delta_;
};

}  // namespace bequest::cuda::chain
