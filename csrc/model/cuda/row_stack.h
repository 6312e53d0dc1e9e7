// All layers of a step of one row in one launch, attention included.
//
// For each layer:
//   qkv = norm(residual) Wqkvᵀ;  attended = attention of its heads, whose key and value go to the cache;
//   residual += attended Woᵀ;  inner = f(norm'(residual) Wgᵀ) * (norm'(residual) Wuᵀ);  residual += inner
//   Wdᵀ.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cache/kv_layout.h"
#include "device/stream.h"
#include "ops/activation.h"
#include "ops/hidden_tap.h"

namespace bequest::cuda {

// What is fixed when a model is loaded. Weights are bfloat16, contiguous, aligned to 16 bytes, without
// biases.
struct RowStackLayer {
  const void* attention_norm;  // [H]
  const void* qkv;             // [(NQ + 2 NKV) D, H]
  const void* q_norm;          // [D]; null: heads are not normed
  const void* k_norm;          // [D]; likewise
  const void* output;          // [H, NQ D]
  const void* mlp_norm;        // [H]
  const void* gate_up;         // [2 I, H], the gate's rows and then those of up
  const void* down;            // [H, I]
  int64_t cache_layer;
  int64_t index;  // which hidden state it begins with
};

struct RowStackShape {
  int64_t hidden;  // H
  int64_t inner;   // I
  int64_t q_heads;
  int64_t kv_heads;
  int64_t head_dim;  // D
};

// Whether there is a kernel for this shape and the current device, where all of it finds room at once.
bool can_stack_row(const RowStackShape& shape);

// Bytes of the table of so many layers, and of the scratch of launches in one stream.
size_t row_stack_table_bytes(int64_t num_layers);
inline constexpr size_t kRowStackScratchBytes = 3 << 20;

// The table of layers, in host memory, from where it is to be copied to the device. REQUIRES: can_stack_row
void write_row_stack_table(const RowStackShape& shape, const RowStackLayer* layers, int64_t num_layers,
                           void* table);

struct RowStackParams {
  RowStackShape shape;
  const void* table;  // in device memory, aligned to 128 bytes
  int64_t num_layers;
  void* residual;  // [H] bfloat16; read and written
  float eps;       // of the norms of rows
  float head_eps;  // and of heads
  Activation activation;
  float scale;                 // of scores
  const float* cos_sin;        // [P, D]: cosines of D / 2 angles, then their sines
  void* kv_cache;              // [NB, L, 2, NKV, BS, D] bfloat16
  KvLayout layout;             // BS a multiple of 16
  const int32_t* position;     // [1], in [0, P): the token's place in its sequence
  const int64_t* slot;         // [1], -1: key and value are not stored
  const int32_t* block_table;  // of the sequence
  const int32_t* num_items;    // [1]: 0: there is no sequence, and nothing is attended to
  HiddenTap tap;               // of what layers begin with; neither `layer` nor `store_output`
  void* scratch;  // [kRowStackScratchBytes], zero before the first launch, of one stream at a time
};

// REQUIRES: can_stack_row. Captured in a graph: what came before the kernel ahead has written the table of
// blocks, position and slot, and the graph holds no other writer of the cache.
void row_stack(const RowStackParams& p, Stream stream);

}  // namespace bequest::cuda
