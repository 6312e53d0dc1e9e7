// Attention of a step's queries over the paged KV cache: any mix of query lengths, grouped heads.
//
// The result of a query depends on its own q and on the keys and values it sees, bit for bit: not on the
// other rows of the step, on how a prompt was cut into steps, on the block size or on the threads.
//
// Where the plan allows bfloat16 and the chip has matrix units, q, keys, values and weights are rounded to it
// as they are multiplied, by all queries alike.
#pragma once

#include <cstdint>

#include "attention/cpu/plan.h"
#include "cache/kv_layout.h"
#include "core/dtype.h"

namespace bequest {

struct PagedAttentionParams {
  const float* q;        // [T, NQ, D], rows q_stride apart
  int64_t q_stride;      // elements
  float* out;            // [T, NQ, D], contiguous; a query that sees no key gets zeros
  const void* kv_cache;  // [NB, L, 2, NKV, BS, D]
  DType kv_dtype;
  KvLayout layout;
  int64_t layer;
  float scale;     // REQUIRES: above 0, if the plan allows bfloat16
  float soft_cap;  // c: scores become c * tanh(score / c); 0: none
  // Added to the scaled scores: bias[head, clamp(key - query, -reach, reach) + reach], by positions in the
  // sequence. [NQ, 2 * reach + 1], or null. REQUIRES: no soft cap beside it; where the mask is causal a
  // window, however wide: without one sequences may share tiles, whose rows have no positions of their own.
  const float* bias = nullptr;
  int64_t bias_reach = 0;
  float value_scale =
      1.0f;  // what the stored values are to be multiplied by; that of keys is part of `scale`
  // A score per query head that takes its share of the softmax and gives nothing: [NQ], or null.
  const float* sinks = nullptr;
};

// REQUIRES: `out` does not overlap `q`; no other call uses `plan` meanwhile.
void paged_attention(const PagedAttentionParams& p, const AttentionPlan& plan);

}  // namespace bequest
