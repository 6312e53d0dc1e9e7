// Codes of 4 bits in groups of 128, times rows of x, in skinny_chain.cu: sums of whole numbers, which are
// exact.
//
// A group's x become whole numbers of 16 bits in units of a power of two, so that the largest has all bits:
// an error of 2^-16 of it at most. A number is two bytes, 256 * first + second, with signs. The tensor cores
// multiply 16 rows of bytes by 8 columns; here both are two halves. The low nibbles of the 4 bytes of a word
// of codes belong to the first half of the rows, the high ones, sixteenfold in their places, to the second:
// one instruction for each. A token has four columns: its first bytes and its second ones, each with those
// that the low nibbles meet and those that the high ones do. So of a lane's four results the first and the
// last are parts of the sum for one row of W, one token and one of its bytes, and nobody looks at the others.
#pragma once

#include "device/exchange.cuh"
#include "device/reductions.cuh"
#include "device/shared_memory.cuh"
#include "device/tensor_core.cuh"
#include "model/cuda/skinny_chain.cuh"
#include "model/cuda/skinny_chain_rows.cuh"
#include "model/cuda/skinny_chain_weights.cuh"

namespace bequest::cuda::chain {

// A warp's x of a stage and token: for each of kSteps groups four columns of bytes.
inline constexpr int kColumnBytes = 64, kGroupOfBytes = 4 * kColumnBytes;
static_assert(kSteps * kGroupOfBytes == kStageBytesOfX<Form::kInt4>);
// Two tokens fill the columns of a product.
constexpr int pairs_of(int num_tokens) { return (num_tokens + 1) / 2; }

// A lane's x for a stage.
template <int T>
struct ByteRow {
  uint4 of[pairs_of(T)][kSteps];
  float units[pairs_of(T)][kSteps];  // of the lane's byte
  float sums[pairs_of(T)][kSteps];   // of x over each group, where the lane's byte is the first; else 0

  // from, units_from: of the warp's stage
  __device__ __forceinline__ void load(uint32_t from, uint32_t units_from, int row_pitch, int lane) {
    const int column = lane / 4, place = lane % 4;
    const float byte = place % 2 == 0 ? 16.0f : 1.0f / 16;  // 256 or 1, over the sixteen of high nibbles
    const float whole = place % 2 == 0 ? 1.0f : 0.0f;
#pragma unroll
    for (int pair = 0; pair < pairs_of(T); ++pair) {
      // Columns beyond the last token are the last one's; nobody stores what becomes of them.
      const uint32_t row = from + min(2 * pair + column / 4, T - 1) * row_pitch + column % 4 * kColumnBytes;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) of[pair][s] = load_16(row + s * kGroupOfBytes + place * 16);
      uint32_t own[2][kSteps];
      const uint32_t units_at = units_from + min(2 * pair + place / 2, T - 1) * (2 * kSteps * 4);
      load_16(own[0], units_at);
      load_16(own[1], units_at + kSteps * 4);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        units[pair][s] = __uint_as_float(own[0][s]) * byte;
        sums[pair][s] = __uint_as_float(own[1][s]) * whole;
      }
    }
  }
};

// The sums of a stage's codes, of each group.
template <int T>
struct CodeSums {
  int of[pairs_of(T)][kSteps][4] = {};

  __device__ __forceinline__ void add(const Weights<Form::kInt4>& w, const ByteRow<T>& x) {
    // Groups take turns, so that a product need not wait for the one before it.
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const uint32_t first = half == 0 ? w.of[s].x : w.of[s].z, second = half == 0 ? w.of[s].y : w.of[s].w;
        const uint32_t a[4] = {first & kLow, first & kHigh, second & kLow, second & kHigh};
#pragma unroll
        for (int pair = 0; pair < pairs_of(T); ++pair) {
          const uint4& b = x.of[pair][s];
          multiply_accumulate_bytes(of[pair][s], a, half == 0 ? b.x : b.z, half == 0 ? b.y : b.w);
        }
      }
  }

  // Of the lane's row and token, in all lanes of both. Zeros are multiplied with the sum of the group's x.
  __device__ __forceinline__ float scaled(int pair, const uint32_t (&groups)[kSteps],
                                          const ByteRow<T>& x) const {
    float totals[2] = {};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const float zero = static_cast<float>(groups[s] & 0xff);
      const float scale = __uint_as_float(groups[s] & 0xffffff00u);
      const float both = static_cast<float>(16 * of[pair][s][0] + of[pair][s][3]);  // below 2^22: exact
      totals[s % 2] += scale * (both * x.units[pair][s] - zero * x.sums[pair][s]);
    }
    const float total = totals[0] + totals[1];
    return total + __shfl_xor_sync(kAllLanes, total, 1);
  }

 private:
  static constexpr uint32_t kLow = 0x0f0f0f0fu, kHigh = 0xf0f0f0f0u;
};

// Four neighbours of x as two bytes each.
struct FourBytes {
  uint32_t first, second;
  int sum;

  // scale: so that no number exceeds 127 * 256 + 127
  __device__ __forceinline__ FourBytes(const float (&x)[4], float scale) {
    constexpr float kWhole = 12582912;  // 1.5 * 2^23: what is added to it is rounded to a whole number
    uint32_t n[4], over[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      n[i] = __float_as_uint(fmaf(x[i], scale, kWhole));
      over[i] = n[i] + 128;  // the second byte has a sign
    }
    sum = static_cast<int>(n[0] + n[1] + n[2] + n[3] - 4 * 0x4b400000u);
    first = __byte_perm(__byte_perm(over[0], over[1], 0x5151), __byte_perm(over[2], over[3], 0x5151), 0x5410);
    second = __byte_perm(__byte_perm(n[0], n[1], 0x4040), __byte_perm(n[2], n[3], 0x4040), 0x5410);
  }
};

// Rows of x on their way into a phase: a warp's 128 of each 1024, four of them to a lane.
class ByteStager {
 public:
  // rows: [T, row_pitch]; gains: [2, gain_bytes]
  __device__ ByteStager(const Arguments& a, uint8_t* rows, const uint8_t* gains, int warp, int lane)
      : a_(a), rows_(shared_address(rows)), gains_(gains), warp_(warp), lane_(lane) {}

  // A token's x of one stage, in two parts: asks for its words, and waits for them. Meanwhile they are on
  // their way. What the kernel before has stored is there at once.
  using Words = uint4[kSteps];
  __device__ __forceinline__ void ask(const View& view, int chunk, int token, Words& words) const {
    const int left = view.units - chunk * kStageUnits<Form::kInt4>;
    const int first = token * view.units * kUnit + chunk * kStageValues + own();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (s * kSteps >= left) continue;
      const int value = first + s * kGroupStride;
      if (view.from != nullptr) {
        words[s] = load_words(reinterpret_cast<const uint8_t*>(view.from) + place_of_word(value / 2));
      } else {
        const uint2 pairs =
            __ldcg(reinterpret_cast<const uint2*>(static_cast<const BFloat16*>(a_.attended) + value));
        words[s].x = pairs.x;
        words[s].z = pairs.y;
      }
    }
  }
  // Makes bytes of whatever is there until all of it is right: instructions that are needed in a hurry have
  // come by then, which takes longer than to run them. units_to: of the warp's stage. Gives the lane's sum of
  // x², where x is normed
  __device__ __forceinline__ float await(const View& view, int chunk, int token, LaunchNumber number,
                                         Words& words, uint32_t units_to) const {
    const uint32_t launch = number.get();
    const int left = view.units - chunk * kStageUnits<Form::kInt4>;
    const int first = token * view.units * kUnit + chunk * kStageValues + own();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (s * kSteps >= left) words[s].x = words[s].z = 0;
      if (s * kSteps >= left || view.from == nullptr) words[s].y = words[s].w = launch;
    }
    Patience patience;
    bool lacks_any;
    float square;
    do {
      square = place(view, chunk, token, words, units_to + token * (2 * kSteps * 4));
      lacks_any = false;
#pragma unroll
      for (int s = 0; s < kSteps; ++s)
        if (words[s].y != launch || words[s].w != launch) {
          lacks_any = true;
          words[s] = load_words(reinterpret_cast<const uint8_t*>(view.from) +
                                place_of_word((first + s * kGroupStride) / 2));
        }
      patience.spend();
    } while (__any_sync(kAllLanes, lacks_any));
    return square;
  }

 private:
  static constexpr int kStageValues = kStageUnits<Form::kInt4> * kUnit, kGroupStride = kStageValues / kSteps;

  __device__ __forceinline__ int own() const { return warp_ * 128 + lane_ * 4; }

  // The largest of a group, over all lanes, as a power of two: its exponent's bits.
  __device__ __forceinline__ static uint32_t exponent_of(const float (&x)[4]) {
    const auto bits = [&](int i) { return __float_as_uint(x[i]) & 0x7fffffffu; };  // NaN is the largest
    const uint32_t most = __reduce_max_sync(kAllLanes, max(max(bits(0), bits(1)), max(bits(2), bits(3))));
    // A little more than the largest, so that no first byte exceeds 127.
    return max(__float_as_uint(__uint_as_float(most) * 1.004f) >> 23 & 255u, 15u);
  }

  __device__ __forceinline__ float place(const View& view, int chunk, int token, const Words& words,
                                         uint32_t units_to) const {
    const int stage = (warp_ * view.chunks + chunk) * kStageBytesOfX<Form::kInt4>;
    const uint8_t* const gains = gains_ + view.gain * a_.gain_bytes + stage + lane_ * 8;
    const uint32_t to = rows_ + token * a_.row_pitch + stage + lane_ % 2 * (2 * kColumnBytes) + lane_ / 2 * 4;
    uint32_t units[kSteps], sums[kSteps];
    float square = 0;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      float x[4];
      widen_words(words[s], x);
      if (view.gain >= 0) weigh(*reinterpret_cast<const uint2*>(gains + s * kGroupOfBytes), x, square);
      const uint32_t exponent = exponent_of(x);
      const FourBytes bytes(x, __uint_as_float((268 - exponent) << 23));
      units[s] = exponent == 255 ? 0x7fc00000u : (exponent - 14) << 23;
      sums[s] = __float_as_uint(static_cast<float>(__reduce_add_sync(kAllLanes, bytes.sum)) *
                                __uint_as_float(units[s]));
      store_bytes(to + s * kGroupOfBytes, bytes);
    }
    if (lane_ == 0) {
      store_16(units_to, units);
      store_16(units_to + kSteps * 4, sums);
    }
    __syncwarp();
    return square;
  }

  __device__ __forceinline__ static void widen_words(const uint4& words, float (&x)[4]) {
    x[0] = __uint_as_float(words.x << 16);
    x[1] = __uint_as_float(words.x & 0xffff0000u);
    x[2] = __uint_as_float(words.z << 16);
    x[3] = __uint_as_float(words.z & 0xffff0000u);
  }
  __device__ __forceinline__ static void weigh(const uint2& gain, float (&x)[4], float& square) {
#pragma unroll
    for (const float value : x) square += value * value;
    x[0] *= __uint_as_float(gain.x << 16);
    x[1] *= __uint_as_float(gain.x & 0xffff0000u);
    x[2] *= __uint_as_float(gain.y << 16);
    x[3] *= __uint_as_float(gain.y & 0xffff0000u);
  }
  // The eight neighbours of two lanes meet a word of codes. The even lane leaves their first bytes, the odd
  // one the second.
  __device__ __forceinline__ void store_bytes(uint32_t to, const FourBytes& own) const {
    const bool odd = lane_ % 2 != 0;
    const uint32_t other = __shfl_xor_sync(kAllLanes, odd ? own.first : own.second, 1);
    const uint32_t low = odd ? other : own.first, high = odd ? own.second : other;
    store_4(to, __byte_perm(low, high, 0x5140));
    store_4(to + kColumnBytes, __byte_perm(low, high, 0x7362));
  }

  const Arguments& a_;
  const uint32_t rows_;
  const uint8_t* const gains_;
  const int warp_, lane_;
};

// x of a stage in bytes, token by token: the next one's words come meanwhile. words: the first one's; at the
// end, of one row, those of the next stage
template <int T>
__device__ __forceinline__ void stage_bytes(const ByteStager& rows, const View& view, int chunk,
                                            LaunchNumber launch, uint32_t units_to, int warp, int lane,
                                            ByteStager::Words& words,
                                            float (&shared_squares)[kMostChainedRows][kWarps]) {
  if constexpr (T > 1) rows.ask(view, chunk, 0, words);
#pragma unroll 1
  for (int token = 0; token < T; ++token) {
    ByteStager::Words next;
    if (token + 1 < T) rows.ask(view, chunk, token + 1, next);
    float square[1] = {rows.await(view, chunk, token, launch, words, units_to)};
    if (view.gain >= 0) {
      warp_sums(square);
      float& sum = shared_squares[token][warp];
      if (lane == 0) sum = chunk == 0 ? square[0] : sum + square[0];
    }
    if (token + 1 < T) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) words[s] = next[s];
    }
  }
  if (T == 1 && chunk + 1 < view.chunks) rows.ask(view, chunk + 1, 0, words);
}

}  // namespace bequest::cuda::chain
