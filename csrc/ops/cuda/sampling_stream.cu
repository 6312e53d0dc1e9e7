// Rows that stream their logits once, from device memory into registers. A kernel of its own: instructions
// come from far behind a product that has read all of the L2 anew, and this one is small enough to begin
// beside that product.
#include "device/cluster.cuh"
#include "ops/cuda/sampling_launch.cuh"

namespace bequest::cuda::sampler {
namespace {

// The rows that need no more, and those that are not open.
template <class T, bool kMasked, bool kRuns>
__global__ void __launch_bounds__(kRowThreads, 2) stream_kernel(const SampleParams p, bool early) {
  __shared__ ClusterShared shared;
  __shared__ RowMemory memory;
  let_next_start();
  arrive_in_cluster();
  if (!early) wait_for_previous();
  const int vocab = static_cast<int>(p.vocab_size);
  RowCluster logits(shared, nullptr, vocab);
  const int64_t item = blockIdx.x / logits.size();
  ask_whom_to_tell(p, memory.told);
  const int row_id = p.row_ids[item];
  const SamplerRow& row = memory.row;
  if (exists(p, row_id)) copy_row(p.rows[row_id], memory.row);
  if (early) wait_for_previous();
  await_cluster();  // all have begun
  if (!exists(p, row_id) || row.state == RowState::kClosed) {
    if (logits.leads() && threadIdx.x == 0) store(p, memory.told, item, 0, row_id >= 0);
    return;
  }
  if (!begins_run<kRuns>(p, item) || edits(row) || filters(row, vocab)) return;
  sample_run<kRuns>(p, logits, static_cast<int>(item), memory, [&](int i) {
    const Input<T> in(p, i, row);
    if (row.state == RowState::kGreedy) [[likely]]
      return choose_streaming<T, false, kMasked>(logits, in, row);
    return choose_streaming<T, true, kMasked>(logits, in, row);
  });
}

// CTAs of the largest cluster that this device has room for.
template <class Kernel>
unsigned most_ranks(Kernel kernel) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  return clusters_at_once(kernel, shape_of(1, kMostRanks, 0)) > 0 ? kMostRanks : kClusterSize;
}

template <class T, bool kMasked, bool kRuns>
void launch_streaming(const SampleParams& p, bool early, Stream stream) {
  const auto kernel = stream_kernel<T, kMasked, kRuns>;
  static const unsigned most = most_ranks(kernel);
  unsigned size = most;  // about a CTA for each multiprocessor, however many rows there are
  while (size > 1 && p.num * size > kMultiprocessors) size /= 2;
  launch(kernel, shape_of(static_cast<unsigned>(p.num), size, 0), stream, p, early);
}

}  // namespace

void sample_streaming(const SampleParams& p, bool early, Stream stream) {
  dispatch_rows(p, [&]<class T, bool kRuns>() {
    p.masks ? launch_streaming<T, true, kRuns>(p, early, stream)
            : launch_streaming<T, false, kRuns>(p, early, stream);
  });
}

}  // namespace bequest::cuda::sampler
