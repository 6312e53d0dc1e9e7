#include "attention/cuda/decode.cuh"

namespace bequest {
template void launch_decode<64, Fp8Cache>(const AttentionArgs& a, int workers, Scores scores,
                                          cudaStream_t stream);
}  // namespace bequest
