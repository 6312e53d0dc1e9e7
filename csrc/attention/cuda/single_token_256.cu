#include "attention/cuda/single_token.cuh"

namespace bequest::cuda {
template void launch_single_token<256, Bf16Cache>(const AttentionArgs& a, const QkvParams& p,
                                                  int multiprocessors, Stream stream);
template void launch_single_token<256, Fp8Cache>(const AttentionArgs& a, const QkvParams& p,
                                                 int multiprocessors, Stream stream);
}  // namespace bequest::cuda
