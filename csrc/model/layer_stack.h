// The layers of an encoder or of a decoder with cross attention, one after another in one call: what is
// between two kernels of a small step would otherwise take as long as the kernels.
//
// Norms stand before each sublayer. A stream is two arrays: `sum`, what the sublayers so far have made of the
// residual, and `added`, what the last of them adds to it. Every number is what the kernels give when they
// are called one by one.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/cpu/attention.h"
#include "cache/kv_layout.h"
#include "ops/activation.h"
#include "ops/cpu/linear.h"
#include "ops/hidden_tap.h"

namespace bequest {

struct StackNorm {
  const float* weight;  // [H]
  const float* bias;    // [H] of a layer norm; null: a root-mean-square norm
  float eps;
};

struct StackProduct {
  const void* weight;  // packed (ops/cpu/linear.h)
  WeightFormat format;
  const float* bias;  // [N], or null
  int64_t out_features;
  int64_t in_features;
};

struct StackLayer {
  StackNorm attention_norm;
  StackProduct qkv;  // [3 NQ D, H]
  StackProduct attention_output;
  StackNorm cross_norm;  // from here on, of a decoder alone
  StackProduct cross_q;
  StackProduct cross_output;
  StackNorm inner_norm;
  StackProduct up;  // [I, H], or gate and up [2 I, H]
  StackProduct down;
};

struct LayerStack {
  int64_t hidden;
  int64_t num_heads;
  int64_t head_dim;
  float scale;  // of scores
  Activation activation;
  bool gated;
  bool has_cross;  // a decoder's; an encoder's layers use layer 0 of their cache in turns
  std::vector<StackLayer> layers;
};

struct StackStep {
  float* added;  // [T, H], contiguous: what the stream begins with; then, what the last sublayer adds
  float* sum;    // [T, H], contiguous, what is there already
  int64_t num_tokens;
  const int64_t* slots;  // [T]
  void* kv_cache;        // [NB, L, 2, NQ, BS, D]
  DType kv_dtype;
  KvLayout layout;
  const AttentionPlan* attention;
  const AttentionPlan* cross;  // over the same cache, or null
  const float* bias;           // on the scores of self attention, as in attention/cpu/attention.h; or null
  int64_t bias_reach;
  HiddenTap tap;  // of the states that layers begin with; its layer is set here
};

// What a stream can begin with: rows of a table, and of another one that are added to them.
struct StackEmbedding {
  const int32_t* ids;  // [T]
  const void* table;   // packed (ops/cpu/linear.h), [V, H]
  WeightFormat format;
  int64_t vocab_size;
  const int32_t* positions;  // [T]
  const float* rows;         // [P, H], or null
  int64_t num_positions;
};

// Writes the rows to step.added and step.sum. Throws on ids and positions outside the tables.
void embed_rows(const LayerStack& stack, const StackEmbedding& embedding, const StackStep& step);

// REQUIRES: sizes of products fit each other; the plans have T queries; `added` and `sum` overlap nothing
// else.
void run_layers(const LayerStack& stack, const StackStep& step);

}  // namespace bequest
