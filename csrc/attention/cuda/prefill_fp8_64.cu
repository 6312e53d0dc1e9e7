#include "attention/cuda/prefill.cuh"

namespace bequest::cuda {
template void launch_prefill<64, Fp8Cache>(const AttentionArgs& a, int blocks, Scores scores, Stream stream);
}  // namespace bequest::cuda
