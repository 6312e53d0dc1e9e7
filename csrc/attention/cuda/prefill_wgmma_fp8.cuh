// Attention of long query tiles over an fp8 cache on Hopper.
//
// As over bf16 (prefill_wgmma.cuh), but all products are of float16, which e4m3 is exact in: queries are
// rounded to it, as in decode (kv_formats.cuh), and so are the softmax weights. The loading warpgroup makes
// the tiles (prefill_wgmma_fp8_load.cuh).
#pragma once

#include <cuda_runtime.h>

#include "attention/cuda/prefill_wgmma.cuh"
#include "attention/cuda/prefill_wgmma_fp8_load.cuh"
#include "device/copies.cuh"
#include "device/launch.cuh"
#include "device/reductions.cuh"
#include "device/warpgroup.cuh"

namespace bequest::cuda {

template <int D, Scores kScores>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    prefill_wgmma_fp8_kernel(const __grid_constant__ AttentionArgs a,
                             const __grid_constant__ CUtensorMap map) {
  if constexpr (kIsHopper) {
    extern __shared__ __align__(1024) uint8_t shared[];
    auto& buffers = *reinterpret_cast<Fp8PrefillBuffers<D>*>(shared);
    if (threadIdx.x == 0) {
      prefetch_map(map);
      buffers.init();
    }
    wait_for_previous();
    // Not before: decode counts on it that all before this grid has ended.
    let_next_start();
    __syncthreads();
    const int warpgroup = __shfl_sync(kAllLanes, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
      shrink_registers<kLoaderRegisters>();
      load_all_fp8<D>(a, map, buffers);
    } else {
      grow_registers<kMultiplierRegisters>();
      Multiplier<D, Fp8Cache, kScores>(a, buffers, warpgroup - 1).run();
    }
  }
}

template <int D>
void launch_prefill_wgmma_fp8(const AttentionArgs& a, const CUtensorMap& map, int blocks, Scores scores,
                              Stream stream) {
  const auto kernel = scores == Scores::kPlain ? prefill_wgmma_fp8_kernel<D, Scores::kPlain>
                                               : prefill_wgmma_fp8_kernel<D, Scores::kSoftCap>;
  const LaunchShape shape{.grid = static_cast<unsigned>(blocks),
                          .block = kWgmmaThreads,
                          .shared_bytes = sizeof(Fp8PrefillBuffers<D>),
                          .overlaps_previous = true};
  launch(kernel, shape, stream, a, map);
}

}  // namespace bequest::cuda
