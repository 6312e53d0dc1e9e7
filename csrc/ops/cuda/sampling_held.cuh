// Rows that are held in the shared memory of a cluster, and edited there.
#pragma once

#include <algorithm>

#include "ops/cuda/sampling_launch.cuh"

namespace bequest::cuda::sampler {

// The rows with edits, and where rows are few those with filters as well, held in shared memory. They are
// taken in turn by as many clusters as fit on the device: a batch without such rows costs a look at each.
// Runs after the other kernels. The rest of a run whose row has no edits any more stays here, where the same
// token is chosen. The kernels ahead change no row of these. kFew: a multiprocessor has one CTA, which may
// have all registers.
template <class T, bool kRuns, bool kFew>
__global__ void __launch_bounds__(kRowThreads, kFew ? 1 : 2)
    held_kernel(const SampleParams p, bool early, const MemoryPlan plan) {
  extern __shared__ float4 dynamic[];
  __shared__ ClusterShared shared;
  __shared__ SearchShared search;
  __shared__ RowMemory memory;
  let_next_start();
  if (!early) wait_for_previous();
  const int vocab = static_cast<int>(p.vocab_size);
  RowCluster logits(shared, reinterpret_cast<float*>(dynamic), vocab);
  const int64_t first = blockIdx.x / kClusterSize, stride = gridDim.x / kClusterSize;
  int64_t item = first;
  while (item < p.num && !takes<kRuns>(p, item, kFew, true)) item += stride;
  if (early) wait_for_previous();
  if (item >= p.num) return;
  FilterMemory filter = plan.divide(search, dynamic);
  begin_lists(search);
  ask_whom_to_tell(p, memory.told);
  for (; item < p.num; item += stride) {
    if (!takes<kRuns>(p, item, kFew, true)) continue;
    __syncthreads();  // the copy of the row before is not read any more
    copy_row(p.rows[p.row_ids[item]], memory.row);
    sample_run<kRuns>(p, logits, static_cast<int>(item), memory, [&](int i) {
      return choose_staged(logits, Input<T>(p, i, memory.row), filter, memory.row, vocab);
    });
  }
  logits.sync();  // nobody leaves while its memory is read
}

// Two CTAs have room on a multiprocessor with up to 164,000 tokens.
inline MemoryPlan plan_of_held(int vocab) {
  const int slice_len = slice_size(vocab, kClusterSize);
  constexpr int kRoomForLists = 48000;
  return slice_len <= kRoomForLists ? MemoryPlan{slice_len, 128, 512} : MemoryPlan{slice_len, 32, 0};
}

// `most`: clusters
template <bool kFew>
void launch_held(const SampleParams& p, bool early, const MemoryPlan& plan, int64_t most, Stream stream) {
  dispatch_rows(p, [&]<class T, bool kRuns>() {
    launch(held_kernel<T, kRuns, kFew>,
           shape_of(static_cast<unsigned>(std::min(p.num, most)), kClusterSize, plan.bytes()), stream, p,
           early, plan);
  });
}

}  // namespace bequest::cuda::sampler
