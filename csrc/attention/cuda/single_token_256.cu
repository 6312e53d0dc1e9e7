#include "attention/cuda/single_token.cuh"

namespace bequest {
template void launch_single_token<256, Bf16Cache>(const AttentionArgs& a, const cuda::QkvParams& p,
                                                  int multiprocessors, cudaStream_t stream);
template void launch_single_token<256, Fp8Cache>(const AttentionArgs& a, const cuda::QkvParams& p,
                                                 int multiprocessors, cudaStream_t stream);
}  // namespace bequest
