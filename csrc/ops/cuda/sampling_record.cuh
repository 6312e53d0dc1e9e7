// What a choice leaves behind: in the row, for the next step and for the host. Runs of samples of one row.
#pragma once

#include "ops/cuda/sampling_choice.cuh"

namespace bequest::cuda {

// What a CTA has of its row in shared memory: in registers it would crowd out the logits.
struct RowMemory {
  SamplerRow row;   // a copy
  HostTokens told;  // of thread 0
};

// By the whole CTA.
__device__ inline void copy_row(const SamplerRow& from, SamplerRow& to) {
  constexpr int kWords = sizeof(SamplerRow) / sizeof(uint32_t);
  if (threadIdx.x < kWords)
    reinterpret_cast<uint32_t*>(&to)[threadIdx.x] = reinterpret_cast<const uint32_t*>(&from)[threadIdx.x];
  __syncthreads();
}

__device__ inline void ask_whom_to_tell(const SampleParams& p, HostTokens& told) {
  if (threadIdx.x == 0) told = p.told != nullptr ? *p.told : HostTokens{};
}

// By one CTA, after every other has read the row. `row`: its copy
__device__ inline void record(ClusterShared& shared, const SamplerRow& row, SamplerRow& to,
                              int32_t& last_token, int token) {
  auto* counts = reinterpret_cast<int2*>(row.storage + row.counts);
  const int num_counts = row.num_counts;
  if (row.counts_capacity > 0) {
    if (threadIdx.x == 0) shared.found = -1;
    __syncthreads();
    for (int i = threadIdx.x; i < num_counts; i += blockDim.x)
      if (counts[i].x == token) shared.found = i;
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  if (row.counts_capacity > 0) {
    if (shared.found >= 0) {
      ++counts[shared.found].y;
    } else if (num_counts < row.counts_capacity) {
      counts[num_counts] = {token, 1};
      to.num_counts = num_counts + 1;
    }
  }
  if (row.tail_capacity > 0) {
    int32_t* tail = row.storage + row.tail;
    if (row.tail_len == row.tail_capacity) {
      for (int i = 1; i < row.tail_capacity; ++i) tail[i - 1] = tail[i];
      tail[row.tail_capacity - 1] = token;
    } else {
      tail[row.tail_len] = token;
      to.tail_len = row.tail_len + 1;
    }
  }
  if (row.rule != nullptr && row.node >= 0) to.node = row.rule->tree.child(row.node, token);
  to.num_outputs = row.num_outputs + 1;
  last_token = token;
}

// By thread 0.
__device__ inline void store(const SampleParams& p, const HostTokens& told, int64_t item, int token,
                             bool bad) {
  p.tokens[item] = token;
  p.bad[item] = bad;
  if (told.tokens == nullptr) return;
  told.tokens[item] = token;
  told.bad[item] = bad;
  if (item == 0 && told.num_read != nullptr) *told.num_read = *told.read;
}

// What both kernels do after the choice, which rank 0 has. REQUIRES: all CTAs of the cluster have read the
// row, and none reads what is another's.
__device__ inline void finish(const SampleParams& p, RowCluster& logits, const RowMemory& memory,
                              int64_t item, const Choice& choice) {
  if (!logits.leads()) return;
  const int row_id = p.row_ids[item];
  if (!choice.bad && !p.guesses)
    record(logits.shared(), memory.row, p.rows[row_id], p.last_tokens[row_id], choice.token);
  if (threadIdx.x == 0) {
    if (!choice.bad && p.guesses) p.last_tokens[row_id] = choice.token;
    store(p, memory.told, item, choice.bad ? 0 : choice.token, choice.bad);
  }
}

__device__ inline bool exists(const SampleParams& p, int row_id) {
  return row_id >= 0 && row_id < p.num_rows;
}

// Where tokens were drafted a row is sampled several times: its samples are a run, which one cluster takes.
// kRuns: there may be such rows. A loop around the choice takes registers, so the others have their own code.
template <bool kRuns>
__device__ bool begins_run(const SampleParams& p, int64_t item) {
  return !kRuns || item == 0 || p.row_ids[item - 1] != p.row_ids[item];
}

__device__ inline int end_of_run(const SampleParams& p, int first) {
  int end = first + 1;
  while (end < p.num && p.row_ids[end] == p.row_ids[first]) ++end;
  return end;
}

// Samples of the run that begins with `first`, one behind the other: each sees what those before it have left
// in the row. A sample that is not what was drafted is the last. choose(item): by the row's copy, which is
// there; behind it is what finish() requires.
template <bool kRuns, class F>
__device__ void sample_run(const SampleParams& p, RowCluster& logits, int first, RowMemory& memory,
                           F&& choose) {
  if constexpr (!kRuns) return finish(p, logits, memory, first, choose(first));
  int item = first;
  const int end = end_of_run(p, first);
  for (bool right = true; right && item < end; ++item) {
    if (item > first) copy_row(p.rows[p.row_ids[first]], memory.row);
    finish(p, logits, memory, item, choose(item));
    if (item + 1 == end) return;
    logits.sync();  // all see the row and the token as the leader has left them
    right = !p.bad[item] && p.tokens[item] == p.drafts[item];
  }
  if (!logits.leads() || threadIdx.x != 0) return;
  for (; item < end; ++item) store(p, memory.told, item, 0, false);
}

}  // namespace bequest::cuda
