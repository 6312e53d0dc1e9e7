// Rows with filters alone, where rows are many: each pass reads the row anew, so that as many rows as there
// are multiprocessors, or twice as many, are on their way at once and none waits for a cluster.
#include "ops/cuda/sampling_launch.cuh"

namespace bequest::cuda::sampler {
namespace {

// The rows with filters and no edits, a cluster for each: of many rows each has one CTA. The kernel ahead
// changes none of these rows.
template <class T, bool kRuns>
__global__ void __launch_bounds__(kRowThreads, 2)
    filter_kernel(const SampleParams p, bool early, const MemoryPlan plan) {
  extern __shared__ float4 dynamic[];
  __shared__ ClusterShared shared;
  __shared__ SearchShared search;
  __shared__ RowMemory memory;
  let_next_start();
  if (!early) wait_for_previous();
  const int vocab = static_cast<int>(p.vocab_size);
  RowCluster logits(shared, nullptr, vocab);
  const int64_t item = blockIdx.x / logits.size();
  const bool takes_it = takes<kRuns>(p, item, true, false);
  if (early) wait_for_previous();
  if (!takes_it) return;
  FilterMemory filter = plan.divide(search, dynamic);
  begin_lists(search);
  ask_whom_to_tell(p, memory.told);
  copy_row(p.rows[p.row_ids[item]], memory.row);
  sample_run<kRuns>(p, logits, static_cast<int>(item), memory, [&](int i) {
    return choose_read(logits, Input<T>(p, i, memory.row), filter, memory.row, vocab);
  });
  logits.sync();  // nobody leaves while its memory is read
}

}  // namespace

void sample_filtered(const SampleParams& p, bool early, Stream stream) {
  const MemoryPlan plan{0, 128, 8192};
  unsigned size = kClusterSize;  // about a CTA for each multiprocessor
  while (size > 1 && p.num * size > kMultiprocessors) size /= 2;
  if (ceil_div(p.vocab_size, size) > kMostCounted) size *= 2;
  dispatch_rows(p, [&]<class T, bool kRuns>() {
    launch(filter_kernel<T, kRuns>, shape_of(static_cast<unsigned>(p.num), size, plan.bytes()), stream, p,
           early, plan);
  });
}

}  // namespace bequest::cuda::sampler
