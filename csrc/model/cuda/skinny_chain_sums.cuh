// A lane's part of a stage of skinny_chain.cu in tensor cores: its x, and the sums of a tile.
#pragma once

#include "device/fine_values.cuh"
#include "device/pairs.cuh"
#include "device/shared_memory.cuh"
#include "device/tensor_core.cuh"
#include "model/cuda/skinny_chain.cuh"
#include "model/cuda/skinny_chain_weights.cuh"

namespace bequest::cuda::chain {

// A lane's x for a stage. Of codes it has two or four neighbours of 16 bytes for each access to the weights.
template <Form kForm>
struct Row {
  uint2 of[kStageUnits<kForm>];

  __device__ __forceinline__ void load(uint32_t from) {
    constexpr int kPacked = packed(kForm);
#pragma unroll
    for (int i = 0; i < kStageUnits<kForm>; ++i)
      of[i] = load_8(from + i / kPacked * (kPacked * kSliceBytes) + i % kPacked * access_bytes(kForm));
    if constexpr (is_fine_of_8(kForm)) half = from & 2 * lane_bytes(kForm) ? kSecondTwice : kFirstTwice;
  }

  uint32_t half = kFirstTwice;  // of its quad's groups, the lane's
};

// Of codes whose groups have zeros. Pieces of 16 bytes lie by pairs, the second ones first for half of the
// lanes (place_of_piece): those that are read at once are then in different banks.
template <>
struct Row<Form::kInt4> {
  static constexpr int kUnits = kStageUnits<Form::kInt4>;
  uint2 of[kUnits];
  float sums[kSteps];  // of x, over each group: of the lane's token

  __device__ __forceinline__ void load(uint32_t from, uint32_t sums_from) {
    load(from);
    const uint4 words = load_16(sums_from);
    sums[0] = __uint_as_float(words.x);
    sums[1] = __uint_as_float(words.y);
    sums[2] = __uint_as_float(words.z);
    sums[3] = __uint_as_float(words.w);
  }

  // Leaves the sums of a stage where load() finds them. By a warp, for its part of x.
  __device__ __forceinline__ static void prepare(uint32_t from, uint32_t sums_to, int lane) {
    Row row;
    row.load(from);
    row.add_up();
    if (lane < kMostChainedRows)
      store_16(sums_to, make_uint4(__float_as_uint(row.sums[0]), __float_as_uint(row.sums[1]),
                                   __float_as_uint(row.sums[2]), __float_as_uint(row.sums[3])));
    __syncwarp();
  }

 private:
  static_assert(kSteps == 4);

  __device__ __forceinline__ void load(uint32_t from) {
    constexpr int kPacked = packed(Form::kInt4);
    const uint32_t other = from ^ 16;
#pragma unroll
    for (int i = 0; i < kUnits; ++i)
      of[i] = load_8((i % 2 ? other : from) + i / kPacked * (kPacked * kSliceBytes) + i % kPacked / 2 * 32);
  }

  __device__ __forceinline__ void add_up() {
    constexpr int kPacked = packed(Form::kInt4);
    constexpr uint32_t kOnes[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
    float both[kSteps][4] = {};
#pragma unroll
    for (int i = 0; i < kPacked; ++i)
#pragma unroll
      for (int s = 0; s < kSteps; ++s)
        multiply_accumulate_f16(both[s], kOnes, of[kPacked * s + i].x, of[kPacked * s + i].y);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) sums[s] = both[s][0] + both[s][3];
  }
};

// Of the warps that multiply.
__device__ __forceinline__ void sync_consumers() { sync_threads<1, kConsumers>(); }

// Where the sums of a round go: [2, T, kWarps, kPartPitch], in turns.
template <int T>
class RoundSums {
 public:
  __device__ explicit RoundSums(uint8_t* parts) : of_round_(reinterpret_cast<float*>(parts)) {}

  __device__ __forceinline__ const float* get() const { return of_round_; }
  // Of a lane's row and token.
  __device__ __forceinline__ float* place(int warp, int lane) const {
    return of_round_ + (lane % 4 * kWarps + warp) * kPartPitch + row_of_lane(lane);
  }
  // The round has ended; gives its sums, which stay until the next but one.
  __device__ __forceinline__ const float* turn() {
    const float* const ended = of_round_;
    of_round_ += to_other_;
    to_other_ = -to_other_;
    return ended;
  }

 private:
  float* of_round_;
  int to_other_ = T * kWarps * kPartPitch;
};

// The sums of a tile. The tensor cores multiply 16 rows by 8 columns; here both are two halves. The 16 bytes
// that a lane reads of a row of W are its registers as they come: two of them belong to the first half of the
// rows, two to the second. Each token has two columns: one with what of x belongs to the former, one with
// what belongs to the latter. So of a lane's four results the first and the last are parts of the sum for one
// row and one token, and nobody looks at the others.
struct TileSum {
  float of[2][4] = {};  // two, so that a product need not wait for the one before it

  __device__ __forceinline__ void add(const Weights<Form::kNumbers>& w, const Row<Form::kNumbers>& x) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
      multiply_accumulate(of[s % 2], {w.of[s].x, w.of[s].y, w.of[s].z, w.of[s].w}, x.of[s].x, x.of[s].y);
  }

  // The 16 codes that a lane reads become 16 numbers, twice what it reads of numbers.
  __device__ __forceinline__ void add(const Weights<Form::kFloat8>& w, const Row<Form::kFloat8>& x) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const uint32_t codes[4] = {w.of[s].x, w.of[s].y, w.of[s].z, w.of[s].w};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t a[4];
        fp8_to_f16(codes[2 * half], a[0], a[1]);
        fp8_to_f16(codes[2 * half + 1], a[2], a[3]);
        multiply_accumulate_f16(of[half], a, x.of[2 * s + half].x, x.of[2 * s + half].y);
      }
    }
  }

  // A lane's 32 codes of a step are of one group, and so are those of the lanes that share its row. A code in
  // the last bits of a float16 is one of its smallest numbers: code · 2^-24, in the next four bits code ·
  // 2^-20. The former meet the first column of a token, the latter the second, so sums make up for it. Zeros
  // are multiplied with the sum of the group's x.
  __device__ __forceinline__ void add(const Weights<Form::kInt4>& w, const Row<Form::kInt4>& x) {
    float sums[kSteps][4] = {};
    multiply_codes(w, x, sums);
    add_scaled(w.groups, x, sums);
  }
  // The sums of each group's codes.
  __device__ __forceinline__ static void multiply_codes(const Weights<Form::kInt4>& w,
                                                        const Row<Form::kInt4>& x, float (&sums)[kSteps][4]) {
    // Groups take turns, so that a product need not wait for the one before it.
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const uint32_t code = i == 0 ? w.of[s].x : i == 1 ? w.of[s].y : i == 2 ? w.of[s].z : w.of[s].w;
        const uint32_t later = code >> 8;
        const uint32_t a[4] = {code & 0x000f000fu, code & 0x00f000f0u, later & 0x000f000fu,
                               later & 0x00f000f0u};
        multiply_accumulate_f16(sums[s], a, x.of[4 * s + i].x, x.of[4 * s + i].y);
      }
  }
  __device__ __forceinline__ void add_scaled(const uint32_t (&groups)[kSteps], const Row<Form::kInt4>& x,
                                             const float (&sums)[kSteps][4]) {
    constexpr float kFirst = 1 << 24, kSecond = 1 << 20;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const float zero = static_cast<float>(groups[s] & 0xff);
      const float scale = __uint_as_float(groups[s] & 0xffffff00u);
      of[s % 2][0] += scale * (kFirst * sums[s][0] + (kSecond * sums[s][3] - zero * x.sums[s]));
    }
  }

  // A lane has eight codes of each group, and so do those that share its row.
  template <class Codec, Form kForm>
  __device__ __forceinline__ void add_fine(const Weights<kForm>& w, const Row<kForm>& x) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int i = 0; i < Codec::kGroups; ++i) {
        uint32_t a[4];
        Codec::widen(w.of[s], w.groups[s], i, x.half, a);
        multiply_accumulate_f16(of[i % 2], a, x.of[Codec::kGroups * s + i].x, x.of[Codec::kGroups * s + i].y);
      }
  }
  __device__ __forceinline__ void add(const Weights<Form::kFine4>& w, const Row<Form::kFine4>& x) {
    add_fine<fine::Offset4>(w, x);
  }
  __device__ __forceinline__ void add(const Weights<Form::kFine8>& w, const Row<Form::kFine8>& x) {
    add_fine<fine::Scaled8>(w, x);
  }
  __device__ __forceinline__ void add(const Weights<Form::kFineFloat8>& w, const Row<Form::kFineFloat8>& x) {
    add_fine<fine::Float8>(w, x);
  }

  __device__ __forceinline__ float total() const { return (of[0][0] + of[1][0]) + (of[0][3] + of[1][3]); }
};

// The sums of `count` tiles of the next stages, two stages at a time: what is in the ring already takes half
// the waits. x_begin: where a lane's x begins. to: of the lane's row, and of its token if it has one
template <Form kForm>
__device__ __forceinline__ void multiply_pairs(RingEnd<kForm>& ring, int count, int chunks, uint32_t x_begin,
                                               bool has_token, float* to) {
  constexpr uint32_t kBytes = kStageBytesOfX<kForm>;
  Row<kForm> x, x_second;
#pragma unroll 1
  for (; count > 0; --count) {
    uint32_t x_at = x_begin;
    TileSum sum;
    Weights<kForm> w, second;
#pragma unroll 1
    for (int left = chunks; left > 1; left -= 2) {
      x.load(x_at);
      x_second.load(x_at + kBytes);
      x_at += 2 * kBytes;
      ring.take(w, second);
      ring.give_back(w, second);
      sum.add(w, x);
      sum.add(second, x_second);
    }
    if (chunks % 2 != 0) {
      x.load(x_at);
      ring.take(w);
      ring.give_back(w);
      sum.add(w, x);
    }
    if (has_token) *to = sum.total();
    to += kTile;
  }
}

}  // namespace bequest::cuda::chain
