#include "attention/prefill.cuh"

namespace bequest {
template void launch_prefill<128>(const AttentionArgs& a, int workers, Scores scores, cudaStream_t stream);
}  // namespace bequest
