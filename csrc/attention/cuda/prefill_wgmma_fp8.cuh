// Attention of long query tiles over an fp8 cache on Hopper.
//
// As over bf16 (prefill_wgmma.cuh), but all products are of float16, which e4m3 is exact in: queries are
// rounded to it, as in decode (kv_formats.cuh), and so are the softmax weights. A multiplying warpgroup takes
// its queries to registers and rounds them there; the loading one makes the tiles of keys and values
// (prefill_wgmma_fp8_load.cuh).
#pragma once

#include "attention/cuda/prefill_wgmma.cuh"
#include "attention/cuda/prefill_wgmma_fp8_load.cuh"

namespace bequest::cuda {

template <int D>
void launch_prefill_wgmma_fp8(const AttentionArgs& a, const PrefillMaps& maps, int blocks, Scores scores,
                              Stream stream) {
  launch_prefill_wgmma_over<D, Fp8Cache, Fp8PrefillBuffers<D>>(a, maps, blocks, scores, stream);
}

}  // namespace bequest::cuda
