// Formats of weights as tile_linear.cuh reads them: 128 bytes of a row are a unit of k. A line is 128 bytes
// of x, a batch the same k of W. Rows of 128 bytes have the 16-byte piece p of row r at p ^ (r % 8).
#pragma once

#include "device/pairs.cuh"
#include "device/shared_memory.cuh"
#include "device/tensor_core.cuh"
#include "device/warpgroup.cuh"

namespace bequest::cuda {

inline constexpr int kBatchSteps = 4;  // of a batch: 16 of k, of x in e4m3 32

// A batch of 16 rows of W as a warp's operands: of each step the lane's rows l / 4 and l / 4 + 8, at columns
// l % 4 * 2 and 8 further on.
using TileOperands = uint32_t[kBatchSteps][4];

__device__ __forceinline__ uint32_t load_2(uint32_t address) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
  return v;
}

struct TileBFloat16 {
  static constexpr int kUnit = 64, kLine = 64;  // of k
  static constexpr bool kGrouped = false;
  static constexpr bool kIsScaled = false;  // each row of W has a scale
  static constexpr bool kIsOperand = true;  // the tensor cores can read it where it is

  template <int kCount>
  __device__ static __forceinline__ void multiply_operands(float (&c)[kCount], uint64_t a, uint64_t b) {
    multiply(c, a, b, true);
  }

  // Where the lane reads of a warp's 16 rows.
  __device__ static __forceinline__ uint32_t lane_place() {
    return threadIdx.x % 16 * 128 + ((threadIdx.x % 32 / 16 ^ threadIdx.x % 8) * 16);
  }
  // `rows`: the warp's, of the stage, with the lane's place
  __device__ static __forceinline__ void load(uint32_t rows, int /*batch*/, const uint32_t (&)[2],
                                              TileOperands& to) {
#pragma unroll
    for (int step = 0; step < kBatchSteps; ++step) load_matrices(to[step], rows ^ (step * 32));
  }
};

struct TileFloat8 {
  static constexpr int kUnit = 128, kLine = 64;
  static constexpr bool kGrouped = false, kIsScaled = true, kIsOperand = false;

  // The lane's first row; the other is 8 further on.
  __device__ static __forceinline__ uint32_t lane_place() { return threadIdx.x / 4 % 8 * 128; }
  __device__ static __forceinline__ void load(uint32_t row, int batch, const uint32_t (&)[2],
                                              TileOperands& to) {
    const uint32_t group = threadIdx.x / 4 % 8, quad = threadIdx.x % 4;
#pragma unroll
    for (int step = 0; step < kBatchSteps; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t from = row + ((batch * kBatchSteps + step) ^ group) * 16 + quad * 2;
        to[step][i] = fp8_pair_to_bf16(load_2(from + i % 2 * (8 * 128) + i / 2 * 8));
      }
  }

 private:
  __device__ static __forceinline__ uint32_t fp8_pair_to_bf16(uint32_t two) {
    uint32_t pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(two)));
    const float2 both = __half22float2(reinterpret_cast<const __half2&>(pair));
    return pack(both.x, both.y);
  }
};

// Two groups of 128 are a unit. Each has a word for every row, see CodeGroup.
struct TileInt4 {
  static constexpr int kUnit = 256, kLine = 64;
  static constexpr bool kGrouped = true, kIsScaled = false, kIsOperand = false;

  __device__ static __forceinline__ float scale(uint32_t word) { return __uint_as_float(word & 0xffffff00u); }
  // 128 + zero, twice
  __device__ static __forceinline__ uint32_t offset(uint32_t word) {
    return (0x4300u + (word & 0xff)) * 0x10001u;
  }

  __device__ static __forceinline__ uint32_t lane_place() { return threadIdx.x / 4 % 8 * 128; }
  // Codes as the last bits of 128 are bfloat16 at once. A quad reads the same 32 codes of a row.
  __device__ static __forceinline__ void load(uint32_t row, int batch, const uint32_t (&offsets)[2],
                                              TileOperands& to) {
    const uint32_t group = threadIdx.x / 4 % 8, shift = threadIdx.x % 4 * 4;
#pragma unroll
    for (int piece = 0; piece < 2; ++piece)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t at = row + half * (8 * 128) + ((batch * 2 + piece) ^ group) * 16;
        uint32_t words[4];
        load_16(words, at);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t pair;
          asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(pair) : "r"(words[i] >> shift));
          asm("sub.rn.bf16x2 %0, %1, %2;"
              : "=r"(to[piece * 2 + i / 2][half + i % 2 * 2])
              : "r"(pair), "r"(offsets[half]));
        }
      }
  }
};

}  // namespace bequest::cuda
