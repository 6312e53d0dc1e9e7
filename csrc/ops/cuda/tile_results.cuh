// From the sums of tile_linear.cuh to the results of a product.
//
// A multiprocessor has few warps here, and what happens is a chain of instructions of one of them: a hundred
// take a third of a microsecond. So what is known before the predecessor has ended is worked out there.
#pragma once

#include "core/dtype.h"
#include "device/launch.cuh"
#include "device/vectors.cuh"
#include "ops/cuda/activation.cuh"
#include "ops/cuda/skinny_linear.h"
#include "ops/cuda/tile_parts.cuh"

namespace bequest::cuda::tiles {

// The tile of a CTA, and its block of tokens.
template <class Size>
struct Tile {
  int first_row;  // of W; of a gated product of each half
  int first_token, num_tokens;

  __device__ explicit Tile(const SkinnyLinearParams& p) {
    const int blocks = static_cast<int>(ceil_div(p.num_tokens, Size::kTokens));
    const int index = static_cast<int>(blockIdx.y);
    first_row = index / blocks * (p.result == SkinnyResult::kGate ? Size::kRows / 2 : Size::kRows);
    first_token = index % blocks * Size::kTokens;
    num_tokens = min(p.num_tokens - first_token, Size::kTokens);
  }
};

// A thread has two outputs of a token at a time, of every kStep-th of the CTA's bands.
template <class Size, bool kNorm>
class Results {
 public:
  using Band = Bands<Size>;

  __device__ Results(const SkinnyLinearParams& p, const Tile<Size>& tile, const Parts<Size, kNorm>& parts,
                     uint32_t thread)
      : p_(p),
        tile_(tile),
        parts_(parts),
        gated_(p.result == SkinnyResult::kGate),
        stride_(static_cast<int>(gated_ ? p.out_features / 2 : p.out_features)),
        per_feature_(1.0f / static_cast<float>(static_cast<int>(p.in_features))),
        first_band_(thread / kBandThreads),
        num_bands_(parts.num_bands()),
        place_(thread / Band::kPairs % kTokensAtOnce),
        output_(tile.first_row + static_cast<int>((parts.first_band() + first_band_) * Band::kRows +
                                                  thread % Band::kPairs * 2)),
        sums_(parts.of_band(first_band_, 0) + (thread % Band::kPairs * (2 * Band::kPitch) + place_) * 4),
        of_up_(parts.of_band(0, 1) - parts.of_band(0, 0)),
        band_bytes_(parts.of_band(kStep, 0) - parts.of_band(0, 0)),
        to_(address_of(place_)) {
    if constexpr (Size::kHasRoom) asm volatile("" : "+f"(per_feature_), "+r"(sums_), "+l"(to_));
  }

  // What the thread's first results need, from memory that is several hundred clocks away.
  struct Given {
    uint32_t before = 0;  // what they are added to
    float2 scales[2] = {};
    uint32_t biases[2] = {};  // of rows of the gate, and of up
  };
  // Of a product that adds what several bands need, all of it asked for before the products: while the next
  // kernel loads its weights memory answers late.
  static constexpr bool kHolds = Size::Format::kIsOperand && !kNorm;
  static constexpr uint32_t kHeld = kHolds ? 4 : 1;  // bands
  struct Held {
    uint32_t before[kHeld] = {};
    uint32_t gain[kHeld] = {};  // of the norm ahead
  };
  struct First {
    Given given;
    Held held;
  };
  // Behind wait_for_previous.
  __device__ __forceinline__ First begin() const {
    First first;
    if (kHolds && p_.result == SkinnyResult::kAdd)
      first.held = hold(first_band_, output_, to_);
    else if (exists(first_band_, output_, place_))
      first.given = given(output_, to_);
    return first;
  }

  __device__ __forceinline__ void store(const First& first) const {
    if (kHolds && p_.result == SkinnyResult::kAdd)
      add(first.held);
    else
      store(first.given);
  }

 private:
  static constexpr uint32_t kTokensAtOnce =
      Size::kTokens < kThreads / Band::kPairs ? Size::kTokens : kThreads / Band::kPairs;
  static constexpr uint32_t kBandThreads = Band::kPairs * kTokensAtOnce, kStep = kThreads / kBandThreads;
  static_assert(!(kNorm || kHolds) || kTokensAtOnce == Size::kTokens,
                "all results of a thread are of one token");

  __device__ __forceinline__ void store(const Given& first) const {
    const float norm = kNorm ? rsqrtf(parts_.square(Band::token_at(place_)) * per_feature_ + p_.eps) : 1;
    store_place(place_, sums_, to_, first, norm);
#pragma unroll 1
    for (uint32_t i = kTokensAtOnce; i < Size::kTokens; i += kTokensAtOnce) {
      uint32_t* to = address_of(place_ + i);
      store_place(place_ + i, sums_ + i * 4, to,
                  exists(first_band_, output_, place_ + i) ? given(output_, to) : Given(), norm);
    }
  }

  // Of the place's token, those of all bands.
  __device__ __forceinline__ void store_place(uint32_t place, uint32_t sums, uint32_t* to, const Given& first,
                                              float norm) const {
    Given next = first;
    int output = output_;
#pragma unroll 1
    for (uint32_t band = first_band_; exists(band, output, place); band += kStep) {
      const Given now = next;
      float2 value = finished(sums, norm, now, 0);
      if (gated_) {
        const float2 up = finished(sums + of_up_, norm, now, 1);
        value = {gate(p_.activation, value.x, up.x), gate(p_.activation, value.y, up.y)};
      }
      uint32_t* const here = to;
      output += kStep * Band::kRows, to += kStep * Band::kPairs, sums += band_bytes_;
      if (exists(band + kStep, output, place)) next = given(output, to);
      const float2 before{__uint_as_float(now.before << 16), __uint_as_float(now.before & 0xffff0000u)};
      __stcg(here, pack(value.x + before.x, value.y + before.y));
    }
  }

  // The bands from `band` on, whose first output and address are given.
  __device__ __forceinline__ Held hold(uint32_t band, int output, const uint32_t* to) const {
    Held held;
#pragma unroll
    for (uint32_t i = 0; i < kHeld; ++i, band += kStep, output += kStep * Band::kRows) {
      if (!exists(band, output, place_)) break;
      held.before[i] = __ldcg(to + i * (kStep * Band::kPairs));
      if (p_.ahead.gain != nullptr)
        held.gain[i] = __ldg(static_cast<const uint32_t*>(p_.ahead.gain) + output / 2);
    }
    return held;
  }
  __device__ __forceinline__ void add(Held held) const {
    uint32_t sums = sums_, *to = to_;
    int output = output_;
#pragma unroll 1
    for (uint32_t band = first_band_; exists(band, output, place_);) {
      if (band != first_band_) held = hold(band, output, to);
#pragma unroll
      for (uint32_t i = 0; i < kHeld; ++i) {
        if (!exists(band, output, place_)) break;
        const float2 value = finished(sums, 1, of_rows(output), 0);
        const float2 before{__uint_as_float(held.before[i] << 16),
                            __uint_as_float(held.before[i] & 0xffff0000u)};
        const uint32_t result = pack(value.x + before.x, value.y + before.y);
        __stcg(to, result);
        if (p_.ahead.gain != nullptr) leave(to, result, held.gain[i]);
        band += kStep, output += kStep * Band::kRows, to += kStep * Band::kPairs, sums += band_bytes_;
      }
    }
  }
  // For the norm ahead, by the four lanes that have a token's results of a band.
  __device__ __forceinline__ void leave(const uint32_t* stored, uint32_t sums, uint32_t gain) const {
    const auto place = stored - static_cast<const uint32_t*>(p_.out);  // pairs
    const float low = __uint_as_float(sums << 16), high = __uint_as_float(sums & 0xffff0000u);
    const float low_gain = __uint_as_float(gain << 16) + p_.ahead.offset;
    const float high_gain = __uint_as_float(gain & 0xffff0000u) + p_.ahead.offset;
    __stcg(static_cast<uint32_t*>(p_.ahead.rows) + place, pack(low * low_gain, high * high_gain));
    const uint32_t lanes = __activemask();  // whole fours: a mask of four would let each run by itself
    float square = low * low + high * high;
    square += __shfl_xor_sync(lanes, square, 1);
    square += __shfl_xor_sync(lanes, square, 2);
    if (threadIdx.x % 4 == 0) __stcg(p_.ahead.squares + place / 4, square);
  }

  __device__ __forceinline__ bool exists(uint32_t band, int output, uint32_t place) const {
    return band < num_bands_ && output < stride_ &&
           static_cast<int>(Band::token_at(place)) < tile_.num_tokens;
  }
  // Of the thread's first band.
  __device__ __forceinline__ uint32_t* address_of(uint32_t place) const {
    const int token = tile_.first_token + static_cast<int>(Band::token_at(place));
    return reinterpret_cast<uint32_t*>(static_cast<BFloat16*>(p_.out) + (int64_t{token} * stride_ + output_));
  }

  __device__ __forceinline__ Given given(int output, const uint32_t* to) const {
    Given given = of_rows(output);
    if (!kHolds && p_.result == SkinnyResult::kAdd) given.before = __ldcg(to);
    return given;
  }
  // What depends on rows of W alone.
  __device__ __forceinline__ Given of_rows(int output) const {
    Given given;
    if constexpr (Size::Format::kIsScaled) {
      given.scales[0] = __ldg(reinterpret_cast<const float2*>(p_.scales + output));
      if (gated_) given.scales[1] = __ldg(reinterpret_cast<const float2*>(p_.scales + output + stride_));
    }
    if (p_.bias != nullptr) {
      const auto* bias = static_cast<const BFloat16*>(p_.bias) + output;
      given.biases[0] = __ldg(reinterpret_cast<const uint32_t*>(bias));
      if (gated_) given.biases[1] = __ldg(reinterpret_cast<const uint32_t*>(bias + stride_));
    }
    return given;
  }

  // The sums of two neighbours of W's rows, scaled, with their bias, rounded.
  __device__ __forceinline__ float2 finished(uint32_t sums, float norm, const Given& given, int half) const {
    float2 sum = parts_.sum(sums);
    if constexpr (Size::Format::kIsScaled) sum.x *= given.scales[half].x, sum.y *= given.scales[half].y;
    if constexpr (kNorm) sum.x *= norm, sum.y *= norm;
    sum.x += __uint_as_float(given.biases[half] << 16);
    sum.y += __uint_as_float(given.biases[half] & 0xffff0000u);
    return {rounded<BFloat16>(sum.x), rounded<BFloat16>(sum.y)};
  }

  const SkinnyLinearParams& p_;
  const Tile<Size>& tile_;
  const Parts<Size, kNorm>& parts_;
  const bool gated_;
  const int stride_;
  float per_feature_;
  const uint32_t first_band_, num_bands_;
  const uint32_t place_;  // of the thread's token, in a part's rows
  const int output_;      // the first
  uint32_t sums_;         // where its parts are
  const uint32_t of_up_, band_bytes_;
  uint32_t* to_;
};

}  // namespace bequest::cuda::tiles
