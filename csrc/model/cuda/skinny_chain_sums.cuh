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

// Of the warps that multiply.
__device__ __forceinline__ void sync_consumers() { sync_threads<1, kConsumers>(); }

// Where the sums of a round go: [2, T, kWarps, kPartPitch], in turns.
template <int T>
class RoundSums {
 public:
  __device__ explicit RoundSums(uint8_t* parts) : of_round_(reinterpret_cast<float*>(parts)) {}

  __device__ __forceinline__ const float* get() const { return of_round_; }
  // Of a lane's row and token.
  __device__ __forceinline__ float* place(int warp, int lane) const { return place(lane % 4, warp, lane); }
  __device__ __forceinline__ float* place(int token, int warp, int lane) const {
    return of_round_ + (token * kWarps + warp) * kPartPitch + row_of_lane(lane);
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

}  // namespace bequest::cuda::chain
