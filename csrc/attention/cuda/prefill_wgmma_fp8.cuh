// Attention of long query tiles over an fp8 cache on Hopper.
//
// As over bf16 (prefill_wgmma.cuh), but all products are of float16, which e4m3 is exact in: queries are
// rounded to it, as in decode (kv_formats.cuh), and so are the softmax weights. The loading warpgroup makes
// the tiles (prefill_wgmma_fp8_load.cuh).
#pragma once

#include <cuda_runtime.h>

#include <cstdlib>

#include "attention/cuda/prefill_wgmma.cuh"
#include "attention/cuda/prefill_wgmma_fp8_load.cuh"
#include "device/copies.cuh"
#include "device/launch.cuh"
#include "device/reductions.cuh"
#include "device/warpgroup.cuh"

namespace bequest::cuda {

template <int D, class Arithmetic, Scores kScores>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    prefill_wgmma_fp8_kernel(const __grid_constant__ AttentionArgs a,
                             const __grid_constant__ CUtensorMap map) {
  if constexpr (kIsHopper) {
    extern __shared__ __align__(1024) uint8_t shared[];
    auto& buffers = *reinterpret_cast<Fp8PrefillBuffers<D>*>(shared);
    if (threadIdx.x == 0) {
      prefetch_map(map);
      buffers.init(1, kFp8TaskReaders);
    }
    wait_for_previous();
    // Not before: decode counts on it that all before this grid has ended.
    let_next_start();
    __syncthreads();
    const int warpgroup = __shfl_sync(kAllLanes, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
      shrink_registers<kLoaderRegisters>();
      load_all_fp8<D, Arithmetic>(a, map, buffers);
    } else {
      grow_registers<kMultiplierRegisters>();
      Multiplier<D, Fp8Cache, kScores>(a, buffers, warpgroup - 1).run();
    }
  }
}

// With a warpgroup more, which widens: each scheduler then has a warp that does.
inline constexpr int kSpreadThreads = kWgmmaThreads + 128;
inline constexpr int kSpreadLoaderRegisters = 40;
inline constexpr int kSpreadWidenerRegisters = 40;
inline constexpr int kSpreadMultiplierRegisters = 216;
static_assert(kSpreadLoaderRegisters + kSpreadWidenerRegisters + kMultipliers * kSpreadMultiplierRegisters <=
              65536 / 128);

template <int D, class Arithmetic, Scores kScores>
__global__ void __launch_bounds__(kSpreadThreads, 1)
    prefill_wgmma_fp8_spread_kernel(const __grid_constant__ AttentionArgs a,
                                    const __grid_constant__ CUtensorMap map) {
  if constexpr (kIsHopper) {
    extern __shared__ __align__(1024) uint8_t shared[];
    auto& buffers = *reinterpret_cast<Fp8PrefillBuffers<D>*>(shared);
    if (threadIdx.x == 0) {
      prefetch_map(map);
      buffers.init(kSpreadWideners, kSpreadTaskReaders);
    }
    wait_for_previous();
    // Not before: decode counts on it that all before this grid has ended.
    let_next_start();
    __syncthreads();
    const int warpgroup = __shfl_sync(kAllLanes, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
      shrink_registers<kSpreadLoaderRegisters>();
      load_all_stored<D>(a, map, buffers);
    } else if (warpgroup == 1) {
      shrink_registers<kSpreadWidenerRegisters>();
      widen_all<D, Arithmetic>(buffers);
    } else {
      grow_registers<kSpreadMultiplierRegisters>();
      Multiplier<D, Fp8Cache, kScores>(a, buffers, warpgroup - 2).run();
    }
  }
}

// Makes up for what Arithmetic has left out of keys and values.
template <class Arithmetic>
AttentionArgs with_factor(AttentionArgs a) {
  a.score_factor *= Arithmetic::kFactor;
  a.value_scale *= Arithmetic::kFactor;
  return a;
}

// While they are being compared: BEQUEST_FP8_PREFILL=b moves bits instead of converting, c does so in a
// warpgroup of its own.
inline char fp8_prefill_variant() {
  static const char variant = [] {
    const char* wish = std::getenv("BEQUEST_FP8_PREFILL");
    return wish != nullptr ? wish[0] : 'a';
  }();
  return variant;
}

template <int D>
void launch_prefill_wgmma_fp8(const AttentionArgs& a, const CUtensorMap& map, int blocks, Scores scores,
                              Stream stream) {
  const auto shape = [&](int threads) {
    return LaunchShape{.grid = static_cast<unsigned>(blocks),
                       .block = static_cast<unsigned>(threads),
                       .shared_bytes = sizeof(Fp8PrefillBuffers<D>),
                       .overlaps_previous = true};
  };
  const bool is_plain = scores == Scores::kPlain;
  if (is_plain && fp8_prefill_variant() == 'b')
    return launch(prefill_wgmma_fp8_kernel<D, ByShifts, Scores::kPlain>, shape(kWgmmaThreads), stream,
                  with_factor<ByShifts>(a), map);
  if (is_plain && fp8_prefill_variant() == 'c')
    return launch(prefill_wgmma_fp8_spread_kernel<D, ByShifts, Scores::kPlain>, shape(kSpreadThreads), stream,
                  with_factor<ByShifts>(a), map);
  const auto kernel = is_plain ? prefill_wgmma_fp8_kernel<D, ByConversion, Scores::kPlain>
                               : prefill_wgmma_fp8_kernel<D, ByConversion, Scores::kSoftCap>;
  launch(kernel, shape(kWgmmaThreads), stream, a, map);
}

}  // namespace bequest::cuda
