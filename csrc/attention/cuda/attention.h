// Attention of a step's queries over the paged KV cache on a GPU: the contract of attention/cpu/attention.h,
// walked from a work list in device memory. Grids depend on sizes fixed at start-up alone, so that a captured
// graph serves every later list.
//
// bf16: the result of a row depends, in its last bits, on how the list cut its keys. f32: it depends on
// nothing but the row's own q and the keys it sees. Over an fp8 cache bf16 queries are multiplied as float16,
// which fp8 is exact in; magnitudes beyond 65504 stay there.
#pragma once

#include <cstdint>

#include "attention/cuda/work_list.h"
#include "cache/kv_layout.h"
#include "core/dtype.h"
#include "device/stream.h"
#include "ops/cuda/float8_rows.h"

namespace bequest {

// Which launches a call makes. A graph captures those that any of its steps may need.
struct AttentionLaunches {
  bool decode;
  bool prefill;
  int max_merges;  // 0: no merge. The decode grid merges by itself where it can, without a launch.
};

struct CudaAttentionParams {
  const void* q;         // [T, NQ, D], rows q_stride apart, 16-byte aligned
  int64_t num_tokens;    // T
  int64_t q_stride;      // elements
  void* out;             // [T, NQ, D], contiguous; rows no item covers (padding) stay as they are
  DType dtype;           // of q and out, bf16 or f32
  const void* kv_cache;  // [NB, L, 2, NKV, BS, D]
  DType kv_dtype;        // the same, or fp8
  float key_scale;       // what stored keys and values are to be multiplied by
  float value_scale;
  KvLayout layout;  // bf16: BS a power of two, at least 8; D 64, 128, 256, or 512 beside a cache in bf16
  int64_t layer;
  int num_q_heads;
  float scale;     // > 0
  float soft_cap;  // c: scores become c * tanh(score / c); 0: none
  // As in attention/cpu/attention.h: [NQ, 2 * reach + 1] added to the scaled scores by distance, or null. No
  // soft cap beside it.
  const float* bias;
  int bias_reach;
  const float* sinks;           // as in attention/cpu/attention.h: [NQ], or null
  bool causal;                  // as in the list's shape
  int window;                   // likewise
  const int32_t* block_tables;  // [S, MB], rows max_blocks apart
  int64_t max_blocks;
  const int32_t* work_list;  // [lists.size]
  WorkListLayout lists;
  float* state_values;  // [state_rows, NKV, D]: o of the partial states
  float* state_scales;  // [state_rows, NKV, 2]: {m, d}, m in powers of two
  int32_t* tickets;     // [lists.ticket_ints], zero before the first call; every call leaves it so
  // [NKV, mail_rows, D / 2] and [NKV, mail_rows, 2]: the mailbox (mailbox.cuh), all bits set before the first
  // call; every call leaves it so.
  uint32_t* mail;
  // Codes not null: results are wanted in e4m3 and nowhere else; what `out` then holds means nothing. Of
  // bf16, with at most 16,384 columns.
  cuda::Float8Rows rounded;
};

// What the list has to know of the kernel that prefill goes to, on the current device, without a bias.
int prefill_blocks_per_sm(int head_dim, DType kv_dtype);

// Whether the decode kernel knows wide tiles, on the current device.
bool has_wide_tiles();

// Throws on a shape no kernel serves or a failed launch.
void cuda_paged_attention(const CudaAttentionParams& p, const AttentionLaunches& launches, Stream stream);

}  // namespace bequest
