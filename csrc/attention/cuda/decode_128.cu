#include "attention/cuda/decode.cuh"

namespace bequest {
template void launch_decode<128, Bf16Cache>(const AttentionArgs& a, int workers, Scores scores,
                                            cudaStream_t stream);
}  // namespace bequest
