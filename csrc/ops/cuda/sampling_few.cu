// Few rows, each held by a cluster whose CTAs have a multiprocessor each.
#include "ops/cuda/sampling_held.cuh"

namespace bequest::cuda::sampler {

void sample_few(const SampleParams& p, bool early, Stream stream) {
  check(p.num <= kHeldRows, "sample: too many rows to hold");
  launch_held<true>(p, early, plan_of_held(static_cast<int>(p.vocab_size)), kHeldRows, stream);
}

}  // namespace bequest::cuda::sampler
