#include "attention/cuda/decode.cuh"

namespace bequest::cuda {
template void launch_decode<128, Bf16Cache>(const AttentionArgs& a, int workers, Scores scores,
                                            Stream stream);
}  // namespace bequest::cuda
