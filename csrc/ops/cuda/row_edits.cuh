// What a sampler row does to its logits: masks, bias and penalties, on a slice in shared memory.
#pragma once

#include "ops/cuda/sampling.h"
#include "ops/cuda/vocab_row.cuh"

namespace bequest::cuda {

__device__ inline bool edits(const SamplerRow& row) {
  return row.allowed >= 0 || row.rule != nullptr || row.num_bad_words > 0 || row.num_bias > 0 ||
         row.counts_capacity > 0 || (row.num_outputs < row.min_tokens && row.num_held_back > 0);
}

__device__ inline void mask_bad_words(RowCluster& logits, const SamplerRow& row) {
  const int32_t* starts = row.storage + row.bad_words;
  const int32_t* tokens = starts + row.num_bad_words + 1;
  const int32_t* tail = row.storage + row.tail;
  for (int word = threadIdx.x; word < row.num_bad_words; word += kRowThreads) {
    const int before = starts[word + 1] - starts[word] - 1;
    const int32_t* wanted = tokens + starts[word];
    bool matches = before <= row.tail_len;
    for (int i = 0; matches && i < before; ++i) matches = wanted[i] == tail[row.tail_len - before + i];
    float* x = matches ? logits.find(wanted[before]) : nullptr;
    if (x) *x = -INFINITY;
  }
}

__device__ inline void penalise(RowCluster& logits, const SamplerRow& row) {
  const auto* counts = reinterpret_cast<const int2*>(row.storage + row.counts);
  for (int i = threadIdx.x; i < row.num_counts; i += kRowThreads) {
    const auto [token, outputs] = counts[i];
    float* at = logits.find(token);
    if (!at) continue;
    float x = *at;
    const float repetition = row.repetition_penalty;
    if (repetition != 1) x = x > 0 ? __fdiv_rn(x, repetition) : __fmul_rn(x, repetition);
    if (outputs > 0) {
      const float taken =
          __fadd_rn(__fmul_rn(row.frequency_penalty, static_cast<float>(outputs)), row.presence_penalty);
      x = __fadd_rn(x, -taken);
    }
    *at = __fadd_rn(x, 0.0f);
  }
}

// Masks, bias and penalties on the staged slice, in the order of ops/cpu/sampling.h. The allowed mask was
// applied when it was staged.
__device__ inline void edit(RowCluster& logits, const SamplerRow& row) {
  __syncthreads();
  mask_bad_words(logits, row);
  if (row.num_outputs < row.min_tokens) {
    for (int i = threadIdx.x; i < row.num_held_back; i += kRowThreads) {
      float* x = logits.find(row.storage[row.held_back + i]);
      if (x) *x = -INFINITY;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < row.num_bias; i += kRowThreads) {
    float* x = logits.find(row.storage[row.bias + i]);
    if (x) atomicAdd(x, __int_as_float(row.storage[row.bias + row.num_bias + i]));
  }
  __syncthreads();
  penalise(logits, row);
  __syncthreads();
}

}  // namespace bequest::cuda
