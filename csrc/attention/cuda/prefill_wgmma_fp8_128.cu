#include "attention/cuda/prefill_wgmma_fp8.cuh"

namespace bequest::cuda {
template void launch_prefill_wgmma_fp8<128>(const AttentionArgs& a, const PrefillMaps& maps, int blocks,
                                            Scores scores, Stream stream);
}  // namespace bequest::cuda
