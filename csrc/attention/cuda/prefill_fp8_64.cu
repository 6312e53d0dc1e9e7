#include "attention/cuda/prefill.cuh"

namespace bequest {
template void launch_prefill<64, Fp8Cache>(const AttentionArgs& a, int blocks, Scores scores,
                                           cudaStream_t stream);
}  // namespace bequest
