// Codes of 4 bits in groups of 128, times a row of x, in skinny_chain.cu: sums of whole numbers, which are
// exact.
//
// A group's x become whole numbers of 16 bits in units of a power of two, so that the largest has all bits:
// an error of 2^-16 of it at most. A number is two bytes, 256 * first + second, with signs. The tensor cores
// multiply 16 rows of bytes by 8 columns; here both are two halves. The low nibbles of the 4 bytes of a word
// of codes belong to the first half of the rows, the high ones, sixteenfold in their places, to the second:
// one instruction for each. A row of x has four columns: its first bytes and its second ones, each with those
// that the low nibbles meet and those that the high ones do. So of a lane's four results the first and the
// last are parts of the sum for one row of W and one of the bytes, and nobody looks at the others.
//
// Of one row alone: making bytes of a row takes as long as multiplying a stage, and rows follow each other.
#pragma once

#include "device/exchange.cuh"
#include "device/reductions.cuh"
#include "device/shared_memory.cuh"
#include "device/tensor_core.cuh"
#include "model/cuda/skinny_chain.cuh"
#include "model/cuda/skinny_chain_rows.cuh"
#include "model/cuda/skinny_chain_weights.cuh"

namespace bequest::cuda::chain {

// A warp's x of a stage: for each of kSteps groups four columns of bytes.
inline constexpr int kColumnBytes = 64, kGroupOfBytes = 4 * kColumnBytes;
static_assert(kSteps * kGroupOfBytes == kStageBytesOfX<Form::kInt4>);
// A lane's column, and its part of it. The last four columns are the first again.
__device__ __forceinline__ int lane_in_bytes(int lane) { return lane / 4 % 4 * kColumnBytes + lane % 4 * 16; }

// A lane's x for a stage.
struct ByteRow {
  uint4 of[kSteps];
  float units[kSteps];  // of the lane's byte
  float sums[kSteps];   // of x over each group, where the lane's byte is the first; else 0

  // from: of the lane; units_from: of the warp's stage. In units that float16 beside codes has too.
  __device__ __forceinline__ void load(uint32_t from, uint32_t units_from, bool is_first_byte) {
    // 256 or 1, over the sixteen of high nibbles
    const float byte = (is_first_byte ? 16.0f : 1.0f / 16) * kBesideCodes;
    const float whole = is_first_byte ? kBesideCodes : 0.0f;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) of[s] = load_16(from + s * kGroupOfBytes);
    uint32_t own[2][kSteps];
    load_16(own[0], units_from);
    load_16(own[1], units_from + kSteps * 4);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      units[s] = __uint_as_float(own[0][s]) * byte;
      sums[s] = __uint_as_float(own[1][s]) * whole;
    }
  }
};

// The sums of a stage's codes, of each group.
struct CodeSums {
  int of[kSteps][4] = {};

  __device__ __forceinline__ void add(const Weights<Form::kInt4>& w, const ByteRow& x) {
    // Groups take turns, so that a product need not wait for the one before it.
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const uint32_t first = half == 0 ? w.of[s].x : w.of[s].z, second = half == 0 ? w.of[s].y : w.of[s].w;
        const uint32_t a[4] = {first & kLow, first & kHigh, second & kLow, second & kHigh};
        multiply_accumulate_bytes(of[s], a, half == 0 ? x.of[s].x : x.of[s].z,
                                  half == 0 ? x.of[s].y : x.of[s].w);
      }
  }

  // Of the lane's row, in the first two lanes that share it. Zeros are multiplied with the sum of the group's
  // x.
  __device__ __forceinline__ float scaled(const uint32_t (&groups)[kSteps], const ByteRow& x) const {
    float totals[2] = {};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const float zero = static_cast<float>(groups[s] & 0xff);
      const float scale = __uint_as_float(groups[s] & 0xffffff00u);
      const float both = static_cast<float>(16 * of[s][0] + of[s][3]);  // below 2^22: exact
      totals[s % 2] += scale * (both * x.units[s] - zero * x.sums[s]);
    }
    const float total = totals[0] + totals[1];
    return total + __shfl_xor_sync(kAllLanes, total, 1);
  }

 private:
  static constexpr uint32_t kLow = 0x0f0f0f0fu, kHigh = 0xf0f0f0f0u;
};

// The sums of `count` tiles of one stage along k, as multiply_stages has them of float16. x_at: of the lane,
// units_at: of the warp's stage
__device__ __forceinline__ void multiply_byte_stages(RingEnd<Form::kInt4>& ring, int count, uint32_t x_at,
                                                     uint32_t units_at, bool adds, bool has_token, float* to,
                                                     int& left, Weights<Form::kInt4>& w) {
  ByteRow x;
  x.load(x_at, units_at, has_token);
#pragma unroll 1
  for (; count > 0; --count) {
    float before = 0;  // read here, where nothing waits for it
    if (adds && has_token) before = *to;
    CodeSums sums;
    sums.add(w, x);
    uint32_t groups[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) groups[s] = w.groups[s];
    ring.give_back(w);
    if (--left > 0) ring.take(w);
    const float total = before + sums.scaled(groups, x);
    if (has_token) *to = total;
    to += kTile;
  }
}

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

// A row of x on its way into a phase: a warp's 128 of each 1024, four of them to a lane. What it needs of a
// view is read once: views lie in shared memory, and who reads one again waits for it.
class ByteStager {
 public:
  // rows: [row_pitch]
  __device__ __forceinline__ ByteStager(const Arguments& a, const View& view, uint32_t rows,
                                        LaunchNumber launch, int warp, int lane)
      : launch_(launch),
        is_published_(view.from != nullptr),
        has_gain_(view.gain >= 0),
        is_odd_(lane % 2 != 0),
        is_first_lane_(lane == 0),
        keeps_all_(view.kept > 1),
        units_(view.units) {
    const int own = warp * 128 + lane * 4, at = warp * view.kept * kStageBytesOfX<Form::kInt4>;
    from_ = is_published_ ? reinterpret_cast<const uint8_t*>(view.from) + place_of_word(own / 2)
                          : static_cast<const uint8_t*>(a.attended) + own * 2;
    to_ = rows + at + lane % 2 * (2 * kColumnBytes) + lane / 2 * 4;
    gains_ = reinterpret_cast<const uint8_t*>(view.gains) + own * 2;
  }

  // x of one stage, in two parts: asks for its words, and waits for them. Meanwhile they are on
  // their way. What the kernel before has stored is there at once.
  using Words = uint4[kSteps];
  // What it is multiplied by. Not kept in shared memory, which has another stage of weights in its place:
  // it comes while words do.
  using Gains = uint2[kSteps];
  struct Asked {
    Words words;
    Gains gains;
  };
  __device__ __forceinline__ void ask(int chunk, Asked& asked) const {
    constexpr uint32_t kOnes = 0x3f803f80u;
    const int first = first_of(chunk), last = last_group(chunk);
    Words& words = asked.words;
#pragma unroll
    for (uint2& gain : asked.gains) gain = {kOnes, kOnes};
    if (has_gain_) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s)
        asked.gains[s] = __ldg(reinterpret_cast<const uint2*>(gains_ + first + min(s, last) * kGroupPitch));
    }
    // Where there are no words, for nothing: the instructions are there when there are.
    const uint8_t* const any = from_ - (reinterpret_cast<uintptr_t>(from_) & 15);
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
      words[s] = load_words(is_published_ ? word_at(first, min(s, last)) : any);
    if (!is_published_) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const uint2 pairs =
            __ldcg(reinterpret_cast<const uint2*>(from_ + first + min(s, last) * kGroupPitch));
        words[s] = {pairs.x, 0, pairs.y, 0};
      }
    }
  }

  __device__ __forceinline__ bool keeps_all() const { return keeps_all_; }
  __device__ __forceinline__ bool are_there(const Words& words) const {
    return !lacks_any(words, launch_.get());
  }
  // Until they are.
  __device__ __forceinline__ void await(int chunk, Words& words) const {
    const uint32_t launch = launch_.get();
    const int first = first_of(chunk), last = last_group(chunk);
    Patience patience;
#pragma unroll 1
    while (lacks_any(words, launch)) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s)
        if (lacks(words[s], launch)) words[s] = load_words(word_at(first, min(s, last)));
      patience.spend();
    }
  }

  // Leaves them as bytes in shared memory, with the units of groups: without branches, and each step of all
  // groups at once, so that one need not wait for the other. units_to: of the warp's stage. Gives the lane's
  // sum of x².
  __device__ __forceinline__ float place(int chunk, const Gains& gains, const Words& words,
                                         uint32_t units_to) const {
    const uint32_t to = to_ + (keeps_all_ ? chunk * kStageBytesOfX<Form::kInt4> : 0);
    const int last = last_group(chunk);
    float x[kSteps][4], squares[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) squares[s] = weigh(s <= last ? words[s] : uint4{}, gains[s], x[s]);
    uint32_t exponents[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) exponents[s] = exponent_of(x[s]);
    uint32_t firsts[kSteps], seconds[kSteps], units[kSteps], sums[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const FourBytes bytes(x[s], __uint_as_float((268 - exponents[s]) << 23));
      units[s] = exponents[s] == 255 ? 0x7fc00000u : (exponents[s] - 14) << 23;
      firsts[s] = bytes.first;
      seconds[s] = bytes.second;
      sums[s] = static_cast<uint32_t>(bytes.sum);
    }
    // The eight neighbours of two lanes meet a word of codes. The even lane leaves their first bytes, the odd
    // one the second.
    uint32_t others[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      others[s] = __shfl_xor_sync(kAllLanes, is_odd_ ? firsts[s] : seconds[s], 1);
      sums[s] = static_cast<uint32_t>(__reduce_add_sync(kAllLanes, static_cast<int>(sums[s])));
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const uint32_t low = is_odd_ ? others[s] : firsts[s], high = is_odd_ ? seconds[s] : others[s];
      store_4(to + s * kGroupOfBytes, __byte_perm(low, high, 0x5140));
      store_4(to + s * kGroupOfBytes + kColumnBytes, __byte_perm(low, high, 0x7362));
      sums[s] = __float_as_uint(static_cast<float>(static_cast<int>(sums[s])) * __uint_as_float(units[s]));
    }
    if (is_first_lane_) {
      store_16(units_to, units);
      store_16(units_to + kSteps * 4, sums);
    }
    __syncwarp();
    return (squares[0] + squares[1]) + (squares[2] + squares[3]);
  }

 private:
  static constexpr int kStageValues = kStageUnits<Form::kInt4> * kUnit;
  static constexpr int kGroupPitch = kStageValues / kSteps * 2;  // bytes of attended rows
  // What a published value takes, by what an attended one does.
  static constexpr int kSpread = kSectorPitch / (kSectorWords * 2 * 2);

  // Bytes of attended rows in front of it.
  __device__ __forceinline__ int first_of(int chunk) const {
    return chunk * kStageUnits<Form::kInt4> * kUnit * 2;
  }
  // Of those that a stage has; x behind it is zero.
  __device__ __forceinline__ int last_group(int chunk) const {
    return (units_ - chunk * kStageUnits<Form::kInt4> - 1) / kSteps;
  }
  __device__ __forceinline__ const uint8_t* word_at(int first, int group) const {
    return from_ + (first + group * kGroupPitch) * kSpread;
  }

  __device__ __forceinline__ static bool lacks(const uint4& words, uint32_t launch) {
    return words.y != launch || words.w != launch;
  }
  __device__ __forceinline__ bool lacks_any(const Words& words, uint32_t launch) const {
    bool lacks_one = false;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) lacks_one |= lacks(words[s], launch);
    return __any_sync(kAllLanes, is_published_ && lacks_one);
  }

  // The largest of a group, over all lanes, as a power of two: its exponent's bits.
  __device__ __forceinline__ static uint32_t exponent_of(const float (&x)[4]) {
    const auto bits = [&](int i) { return __float_as_uint(x[i]) & 0x7fffffffu; };  // NaN is the largest
    const uint32_t most = __reduce_max_sync(kAllLanes, max(max(bits(0), bits(1)), max(bits(2), bits(3))));
    // A little more than the largest, so that no first byte exceeds 127.
    return max(__float_as_uint(__uint_as_float(most) * 1.004f) >> 23 & 255u, 15u);
  }

  // Two words of x, times the gain. Gives the sum of x².
  __device__ __forceinline__ static float weigh(const uint4& words, const uint2& gain, float (&x)[4]) {
    x[0] = __uint_as_float(words.x << 16);
    x[1] = __uint_as_float(words.x & 0xffff0000u);
    x[2] = __uint_as_float(words.z << 16);
    x[3] = __uint_as_float(words.z & 0xffff0000u);
    const float square = (x[0] * x[0] + x[1] * x[1]) + (x[2] * x[2] + x[3] * x[3]);
    x[0] *= __uint_as_float(gain.x << 16);
    x[1] *= __uint_as_float(gain.x & 0xffff0000u);
    x[2] *= __uint_as_float(gain.y << 16);
    x[3] *= __uint_as_float(gain.y & 0xffff0000u);
    return square;
  }

  const LaunchNumber launch_;
  const bool is_published_, has_gain_, is_odd_, is_first_lane_, keeps_all_;
  const int units_;
  const uint8_t *from_, *gains_;  // the lane's first
  uint32_t to_;                   // the same
};

// x of a stage in bytes, of these words. Makes them of whatever is there first, because instructions that are
// needed in a hurry take longer to come than to run. Gives the lane's sum of x².
__device__ __forceinline__ float stage_bytes(const ByteStager& rows, int chunk, uint32_t units_to,
                                             ByteStager::Asked& asked) {
  bool is_real = rows.are_there(asked.words);
#pragma unroll 1
  for (;;) {
    const float square = rows.place(chunk, asked.gains, asked.words, units_to);
    if (is_real) return square;
    rows.await(chunk, asked.words);
    is_real = true;
  }
}

// The tiles of a round, stage by stage along k; x of the first round is staged on the way. asked: of the
// first stage. x_at: of the lane, units_at: of the warp. Gives the lane's sum of x² then.
__device__ __forceinline__ float multiply_byte_round(const ByteStager& rows, bool is_first,
                                                     RingEnd<Form::kInt4>& ring, int count, int chunks,
                                                     uint32_t x_at, uint32_t units_at, bool has_token,
                                                     float* to, int& left, Weights<Form::kInt4>& w,
                                                     ByteStager::Asked& asked) {
  float square = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    if (is_first) {
      square += stage_bytes(rows, chunk, units_at, asked);
      if (chunk + 1 < chunks) rows.ask(chunk + 1, asked);
    }
    multiply_byte_stages(ring, count, x_at, units_at, chunk > 0, has_token, to, left, w);
    if (!rows.keeps_all()) continue;
    x_at += kStageBytesOfX<Form::kInt4>;
    units_at += kSumBytes;
  }
  return square;
}

}  // namespace bequest::cuda::chain
