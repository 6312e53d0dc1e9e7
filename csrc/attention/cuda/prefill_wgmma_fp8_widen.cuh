// How a warp makes float16 of e4m3, for the tiles of the wgmma prefill kernel (prefill_wgmma_fp8.cuh).
#pragma once

#include <cuda_runtime.h>

#include "attention/cuda/prefill_wgmma_load.cuh"
#include "device/pairs.cuh"
#include "device/shared_memory.cuh"
#include "device/warpgroup.cuh"

namespace bequest::cuda {

// 16 codes become 8 pairs, by the instruction that is made for it. It is slow: it may share the unit of exp2.
struct ByConversion {
  static constexpr float kFactor = 1.0f;  // what a widened value is to be multiplied by

  __device__ __forceinline__ static void widen(const uint32_t (&fours)[4], uint32_t (&low)[4],
                                               uint32_t (&high)[4]) {
    fp8_to_f16(fours[0], low[0], low[1]);
    fp8_to_f16(fours[1], low[2], low[3]);
    fp8_to_f16(fours[2], high[0], high[1]);
    fp8_to_f16(fours[3], high[2], high[3]);
  }
};

// The same by moving bits: a code's bits in the places of float16's are its value times 2^-8, subnormals
// too. Only NaN would become 480, so chunks in doubt are converted.
struct ByShifts {
  static constexpr float kFactor = 256.0f;

  __device__ __forceinline__ static void widen(const uint32_t (&fours)[4], uint32_t (&low)[4],
                                               uint32_t (&high)[4]) {
    uint32_t doubt = 0;
    shift(fours[0], low[0], low[1], doubt);
    shift(fours[1], low[2], low[3], doubt);
    shift(fours[2], high[0], high[1], doubt);
    shift(fours[3], high[2], high[3], doubt);
    if (__builtin_expect(doubt != 0, false)) {
      ByConversion::widen(fours, low, high);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        low[i] = shrink(low[i]);
        high[i] = shrink(high[i]);
      }
    }
  }

 private:
  __device__ __forceinline__ static void shift(uint32_t four, uint32_t& low, uint32_t& high,
                                               uint32_t& doubt) {
    low = shift_pair<0x1800>(four, doubt);
    high = shift_pair<0x3a22>(four, doubt);
  }

  // kBytes has each code in the upper byte of a half, and above the lower half copies of its sign: these
  // are what an arithmetic shift brings into its sign.
  template <uint32_t kBytes>
  __device__ __forceinline__ static uint32_t shift_pair(uint32_t four, uint32_t& doubt) {
    uint32_t spread;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(spread) : "r"(four), "n"(kBytes));
    // NaN and what is 384 or more are infinite or NaN as a float16: then this is not 0 any more.
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(doubt) : "r"(spread), "r"(0));
    return static_cast<uint32_t>(static_cast<int32_t>(spread) >> 1) & 0xbf80bf80u;
  }

  __device__ __forceinline__ static uint32_t shrink(uint32_t pair) {
    uint32_t result;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(0x1c001c00));  // 2^-8
    return result;
  }
};

// Widens units of e4m3 into tiles of float16. By a whole warp.
//
// A load takes 16 stored bytes of a lane, which become two neighbouring chunks of a row of a panel. Eight
// lanes are served at once, both when they load and when they store. Where a row fills a panel and no more
// (D = 64), they have two rows side by side, whose chunks the swizzle places apart. Where a row has two
// panels, four of them have one row's part of the first and four the next row's part of the second: these lie
// in different banks on both sides.
//
// kUnitRows: of the unit, that this warp widens; a multiple of 8.
template <int D, class Arithmetic, int kUnitRows>
class UnitWidener {
 public:
  using B = PrefillBuffers<D>;

  __device__ UnitWidener() {
    const int lane = threadIdx.x % 32;
    const int panel = D == 64 ? 0 : lane / 4 % 2;
    const int row = D == 64 ? lane / 4 : lane / 16 * 2 + (lane / 8 + panel) % 2;
    source_ = row * D + panel * 64 + lane % 4 * 16;
    target_ = panel * B::kTilePanelBytes + panel_offset(row, lane % 4 * 2);
  }

  // `unit`: the first of the rows as stored; `target`: the same row in the tile. Rows outside of [begin, end)
  // become zeros if it kMasks.
  template <bool kMasks>
  __device__ __forceinline__ void widen(uint32_t unit, uint32_t target, int begin, int end) const {
    constexpr int kRows = 512 / D;  // that the warp loads at once
    constexpr int kLoads = kUnitRows / kRows;
    constexpr int kBatch = 4;
    static_assert(D == 64 || D == 128);
    static_assert(kUnitRows % 8 == 0 && kLoads % kBatch == 0);
    unit += source_;
    target += target_;
#pragma unroll 1
    for (int done = 0; done < kLoads; done += kBatch) {
      uint32_t fours[kBatch][4];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) load_16(fours[i], unit + i * 512);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if constexpr (kMasks) {
          const int row = (done + i) * kRows + static_cast<int>(source_ / D);
          if (row < begin || row >= end) fours[i][0] = fours[i][1] = fours[i][2] = fours[i][3] = 0;
        }
        uint32_t low[4], high[4];
        Arithmetic::widen(fours[i], low, high);
        const uint32_t place = row_place(target, i);
        store_16(place, low);
        store_16(place ^ 16, high);
      }
      unit += kBatch * 512;
      target += kBatch * kRows * kPanelRowBytes;
    }
  }

 private:
  // Of load i of a batch. Four rows further the swizzle flips a bit of the chunk; after eight it is the same.
  __device__ __forceinline__ static uint32_t row_place(uint32_t target, int i) {
    if constexpr (D == 64) return target + i * kSwizzleBytes;
    return (i % 2 ? (target ^ 64) + 4 * kPanelRowBytes : target) + i / 2 * kSwizzleBytes;
  }

  uint32_t source_, target_;
};

}  // namespace bequest::cuda
