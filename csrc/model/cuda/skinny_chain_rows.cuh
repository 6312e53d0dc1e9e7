// Rows of x on their way into a phase of skinny_chain.cu: a warp's part of them, 32 of each 256, from the L2
// to its own place in shared memory.
#pragma once

#include "device/copies.cuh"
#include "device/exchange.cuh"
#include "device/pairs.cuh"
#include "device/reductions.cuh"
#include "device/shared_memory.cuh"
#include "model/cuda/skinny_chain.cuh"
#include "ops/cuda/skinny_norm.cuh"

namespace bequest::cuda::chain {

// x · (gain + offset) of two values, their squares added to `square`.
__device__ __forceinline__ uint32_t offset_weighted(uint32_t x, uint32_t gain, float& square, float offset) {
  const float low = __uint_as_float(x << 16), high = __uint_as_float(x & 0xffff0000u);
  square += low * low;
  square += high * high;
  return pack(low * (__uint_as_float(gain << 16) + offset),
              high * (__uint_as_float(gain & 0xffff0000u) + offset));
}

// Two words, each in one access.
__device__ __forceinline__ uint4 load_words(const uint8_t* p) {
  uint64_t words[2];
  load_relaxed(words, p);
  return {static_cast<uint32_t>(words[0]), static_cast<uint32_t>(words[0] >> 32),
          static_cast<uint32_t>(words[1]), static_cast<uint32_t>(words[1] >> 32)};
}

__device__ __forceinline__ Word* word_at(Word* words, int word) {
  return reinterpret_cast<Word*>(reinterpret_cast<uint8_t*>(words) + place_of_word(word));
}

__device__ __forceinline__ void store_word(Word* p, uint32_t values, uint32_t launch) {
  store_relaxed(reinterpret_cast<uint64_t*>(p), uint64_t{launch} << 32 | values);
}

// Two values of x as the tensor cores take them.
template <Form kForm>
__device__ __forceinline__ uint32_t entering(uint32_t x) {
  if constexpr (kForm == Form::kNumbers) return x;
  return pack_f16(__uint_as_float(x << 16) * kBesideCodes, __uint_as_float(x & 0xffff0000u) * kBesideCodes);
}

// The same of x · gain, their squares added to `square`.
template <Form kForm>
__device__ __forceinline__ uint32_t entering(uint32_t x, uint32_t gain, float& square) {
  if constexpr (kForm == Form::kNumbers) return weighted(x, gain, square);
  const float low = __uint_as_float(x << 16), high = __uint_as_float(x & 0xffff0000u);
  square += low * low;
  square += high * high;
  return pack_f16(low * __uint_as_float(gain << 16) * kBesideCodes,
                  high * __uint_as_float(gain & 0xffff0000u) * kBesideCodes);
}

// Asks for the gain of a norm, in the order of a row of x.
template <Form kForm>
__device__ __forceinline__ void ask_gain(const Phase& phase, uint8_t* to) {
  const int padded = phase.chunks * kStageUnits<kForm>, pitch = padded * kSliceBytes;
#pragma unroll 1
  for (int i = threadIdx.x; i < padded * (kUnit / 8); i += kConsumers) {  // 16 bytes each
    const int unit = i / (kUnit / 8), warp = i % (kUnit / 8) / 4;
    const bool exists = unit < phase.units;
    copy_16_async(
        shared_address(to + warp * pitch + unit * kSliceBytes + i % 4 * 16),
        static_cast<const uint4*>(phase.gain) + (exists ? slice_of<kForm>(unit, warp) * 4 + i % 4 : 0),
        exists);
  }
}

// Asks the L2 for it: CTAs take a line each. By one thread.
__device__ __forceinline__ void ask_gain_ahead(const Phase& phase) {
  constexpr int kBytes = 128;
  if (phase.gain == nullptr) return;
#pragma unroll 1
  for (int at = blockIdx.x * kBytes; at < phase.units * (kUnit * 2); at += gridDim.x * kBytes)
    prefetch_bytes(static_cast<const uint8_t*>(phase.gain) + at, kBytes);
}

// A warp's sums of x² of each token; squares: a lane's.
template <int T>
__device__ __forceinline__ void store_squares(float (&squares)[T], int warp, int lane,
                                              float (&to)[kMostChainedRows][kWarps]) {
  warp_sums(squares);
  if (lane != 0) return;
#pragma unroll
  for (int t = 0; t < T; ++t) to[t][warp] = squares[t];
}

// The 16 bytes that a lane multiplies at once lie in the order in which the tensor cores take them: their
// first and third word, then the others.
template <int T, bool kHasExperts, Form kForm>
class RowStager {
 public:
  // rows: [T, row_pitch]; gains: [2, gain_bytes]
  __device__ RowStager(const Arguments& a, uint8_t* rows, const uint8_t* gains, int warp, int lane)
      : a_(a), rows_(rows), gains_(gains), warp_(warp), lane_(lane) {}

  // x as the kernel before has stored it.
  __device__ __forceinline__ void stage_attended(int units, int chunks) const {
    constexpr int kGroup = 8;  // units; a lane has 16 bytes of each group
    constexpr int kAtOnce =
        T <= 2 ? 2 : 1;  // groups: a trip to the L2 for each would be one behind the other
    const int padded = chunks * kStageUnits<kForm>, row_bytes = units * kUnit * 2;
    const auto* from = static_cast<const uint8_t*>(a_.attended) +
                       slice_of<kForm>(lane_ / 4, warp_) * kSliceBytes + lane_ % 4 * 16;
    uint8_t* to = rows_ + warp_ * padded * kSliceBytes + place_of_piece<kForm>(lane_) * 16;
#pragma unroll 1
    for (int unit = lane_ / 4; unit < padded; unit += kAtOnce * kGroup) {
      uint4 x[kAtOnce][T] = {};
#pragma unroll
      for (int g = 0; g < kAtOnce; ++g)
#pragma unroll
        for (int t = 0; t < T; ++t)
          if (unit + g * kGroup < units)
            x[g][t] = __ldcg(reinterpret_cast<const uint4*>(from + g * (kGroup * kUnit * 2) + t * row_bytes));
#pragma unroll
      for (int g = 0; g < kAtOnce; ++g) {
        if (unit + g * kGroup >= padded) break;
#pragma unroll
        for (int t = 0; t < T; ++t) {
          const uint4& own = x[g][t];
          *reinterpret_cast<uint4*>(to + g * (kGroup * kSliceBytes) + t * a_.row_pitch) = {
              entering<kForm>(own.x), entering<kForm>(own.z), entering<kForm>(own.y), entering<kForm>(own.w)};
        }
      }
      from += kAtOnce * kGroup * kUnit * 2;
      to += kAtOnce * kGroup * kSliceBytes;
    }
    __syncwarp();
  }

  // The same with the residual behind it, from a whole stage on. Of one row; chunks: of both, first_chunks:
  // of x
  __device__ __forceinline__ void stage_with_residual(const BFloat16* residual, int2 units, int first_chunks,
                                                      int chunks) const {
    constexpr int kGroup = 8, kAtOnce = 3;
    const int padded = chunks * kSteps, begin = first_chunks * kSteps;
    const int at = warp_ * kSliceBytes + lane_ % 4 * 16;
    uint8_t* const to = rows_ + warp_ * padded * kSliceBytes + lane_ % 4 * 16;
#pragma unroll 1
    for (int unit = lane_ / 4; unit < padded; unit += kAtOnce * kGroup) {
      uint4 x[kAtOnce] = {};
#pragma unroll
      for (int g = 0; g < kAtOnce; ++g) {
        const int own = unit + g * kGroup, behind = own - begin;
        const bool is_x = behind < 0;
        const auto* from = static_cast<const uint8_t*>(is_x ? a_.attended : residual);
        if (is_x ? own < units.x : behind < units.y)
          x[g] = __ldcg(reinterpret_cast<const uint4*>(from + (is_x ? own : behind) * (kUnit * 2) + at));
      }
#pragma unroll
      for (int g = 0; g < kAtOnce; ++g)
        if (unit + g * kGroup < padded)
          *reinterpret_cast<uint4*>(to + (unit + g * kGroup) * kSliceBytes) = {x[g].x, x[g].z, x[g].y,
                                                                               x[g].w};
    }
    __syncwarp();
  }

  // x [T, K / 2] as the phase before publishes it, multiplied by the gain if there is a norm (`gain`: which,
  // or -1); squares: this lane's sum of x² of each token.
  __device__ __forceinline__ void stage_published(const View& view, int units, int chunks, int gain,
                                                  LaunchNumber number, float (&squares)[T]) const {
    if (kMostBatch > kBatch && units > kBatch * kSteps)
      return stage_batches<kMostBatch>(view, units, chunks, gain, number, squares);
    stage_batches<kBatch>(view, units, chunks, gain, number, squares);
  }

 private:
  static_assert(kForm == Form::kNumbers || (kSteps % packed(kForm) == 0 && !kHasExperts),
                "units that are one are read at once");
  // Groups of kSteps units that are read at once. Beside codes there are registers for a long row, which
  // would else take one trip to the L2 behind another; of experts for what eight of 768 have made.
  static constexpr int kBatch = kHasExperts ? 6 : T == 1 ? 4 : T == 2 ? 2 : 1;
  static constexpr int kMostBatch = kForm == Form::kNumbers ? kBatch : (is_fine(kForm) ? 2 : 4) * kBatch;
  static constexpr int kUnitBytes = place_of_word(kUnit / 2);

  // Where a lane has what of x, from a unit on.
  struct Lane {
    const uint8_t* from;
    uint8_t* to;
    const uint8_t* gains;
    int unit;

    // first: a multiple of kSteps
    __device__ __forceinline__ Lane(const RowStager& s, const View& view, int chunks, int gain, int first) {
      const int own = s.lane_ / 8, slice = (s.warp_ * chunks * kStageUnits<kForm> + first) * kSliceBytes;
      from = reinterpret_cast<const uint8_t*>(view.from) + first * kUnitBytes +
             slice_of<kForm>(own, s.warp_) * (kUnitBytes / kWarps) + s.lane_ % 8 / 2 * kSectorPitch +
             s.lane_ % 2 * 16;
      // Of its 16 bytes an even lane has the first two words, an odd one the others.
      to = s.rows_ + slice + place_of_piece<kForm>(s.lane_ / 2) * 16 + s.lane_ % 2 * 4;
      gains = s.gains_ + gain * s.a_.gain_bytes + slice + s.lane_ * 8;
      unit = first + own;
    }
    __device__ __forceinline__ const uint8_t* word(int units, int batch, int token) const {
      return from + (token * units + batch * kSteps) * kUnitBytes;
    }
    __device__ __forceinline__ void advance(int units) {
      from += units * kUnitBytes;
      to += units * kSliceBytes;
      gains += units * kSliceBytes;
      unit += units;
    }
  };

  template <int kAtOnce>
  __device__ __forceinline__ void stage_batches(const View& view, int units, int chunks, int gain,
                                                LaunchNumber number, float (&squares)[T]) const {
    const uint32_t launch = number.get();
    const int padded = chunks * kStageUnits<kForm>;
    Lane at(*this, view, chunks, gain, 0);
#pragma unroll 1
    for (; at.unit < padded; at.advance(kAtOnce * kSteps)) {
      uint4 words[kAtOnce][T] = {};
      read_until<kAtOnce>(at, units, launch, words);
      place<kAtOnce>(at, view, gain, padded, words, squares);
    }
    __syncwarp();
  }

  // Leaves them in shared memory, as they are multiplied. padded: units of a row
  template <int kAtOnce>
  __device__ __forceinline__ void place(const Lane& lane, const View& view, int gain, int padded,
                                        const uint4 (&words)[kAtOnce][T], float (&squares)[T]) const {
#pragma unroll
    for (int b = 0; b < kAtOnce; ++b) {
      if (lane.unit + b * kSteps >= padded) break;
      uint2 factor;
      if (gain >= 0) factor = *reinterpret_cast<const uint2*>(lane.gains + b * kSteps * kSliceBytes);
#pragma unroll
      for (int t = 0; t < T; ++t) {
        const uint32_t first = words[b][t].x, second = words[b][t].z;
        uint2 values;
        if (gain < 0)
          values = make_uint2(entering<kForm>(first), entering<kForm>(second));
        else if constexpr (kHasExperts)
          values = make_uint2(offset_weighted(first, factor.x, squares[t], view.offset),
                              offset_weighted(second, factor.y, squares[t], view.offset));
        else
          values = make_uint2(entering<kForm>(first, factor.x, squares[t]),
                              entering<kForm>(second, factor.y, squares[t]));
        auto* at = reinterpret_cast<uint32_t*>(lane.to + t * a_.row_pitch + b * kSteps * kSliceBytes);
        at[0] = values.x;
        at[2] = values.y;
      }
    }
  }

  // Two words of each group and token; what lies beyond the last unit stays zero. What is there is not read
  // again.
  template <int kAtOnce>
  __device__ __forceinline__ static void read_until(const Lane& at, int units, uint32_t launch,
                                                    uint4 (&words)[kAtOnce][T]) {
    bool lacks[kAtOnce], lacks_any;
#pragma unroll
    for (int b = 0; b < kAtOnce; ++b) lacks[b] = at.unit + b * kSteps < units;
    Patience patience;
    do {
#pragma unroll
      for (int b = 0; b < kAtOnce; ++b)
        if (lacks[b]) {
#pragma unroll
          for (int t = 0; t < T; ++t) words[b][t] = load_words(at.word(units, b, t));
        }
      lacks_any = false;
#pragma unroll
      for (int b = 0; b < kAtOnce; ++b) {
        if (lacks[b]) {
          lacks[b] = false;
#pragma unroll
          for (int t = 0; t < T; ++t) lacks[b] |= words[b][t].y != launch || words[b][t].w != launch;
        }
        lacks_any |= lacks[b];
      }
      patience.spend();
    } while (lacks_any);
  }

  const Arguments& a_;
  uint8_t* const rows_;
  const uint8_t* const gains_;
  const int warp_, lane_;
};

}  // namespace bequest::cuda::chain
