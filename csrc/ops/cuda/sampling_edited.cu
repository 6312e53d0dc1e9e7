// Rows with edits, where rows are many: clusters take them in turn.
#include "ops/cuda/sampling_held.cuh"

namespace bequest::cuda::sampler {

void sample_edited(const SampleParams& p, bool early, Stream stream) {
  const MemoryPlan plan = plan_of_held(static_cast<int>(p.vocab_size));
  // No more clusters than have room at once: others would begin when the first have taken all their rows.
  constexpr size_t kMemory = 228 * 1024, kOwn = 15 * 1024;  // of a multiprocessor; of a CTA besides the plan
  const bool two_fit = 2 * (plan.bytes() + kOwn) <= kMemory;
  launch_held<false>(p, early, plan, two_fit ? 28 : 14, stream);
}

}  // namespace bequest::cuda::sampler
