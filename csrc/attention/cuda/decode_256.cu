#include "attention/cuda/decode.cuh"

namespace bequest {
template void launch_decode<256, Bf16Cache>(const AttentionArgs& a, int workers, Scores scores,
                                            cudaStream_t stream);
}  // namespace bequest
