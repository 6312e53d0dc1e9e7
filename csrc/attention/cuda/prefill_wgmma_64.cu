#include "attention/cuda/prefill_wgmma.cuh"

namespace bequest::cuda {
template void launch_prefill_wgmma<64>(const AttentionArgs& a, const PrefillMaps& maps, int blocks,
                                       Scores scores, Stream stream);
}  // namespace bequest::cuda
