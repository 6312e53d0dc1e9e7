// Layers on the CPU, one after another in one call: what is between two kernels of a small step would
// otherwise take as long as the kernels.
//
// A layer is a row of sublayers over a residual stream. A sublayer reads the stream (through its norm
// `before`), makes something of it, and adds that (through its norm `behind`, times a factor) to the stream
// (which its norm `after` may norm again). Every number is what the kernels give when they are called one by
// one.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "attention/cpu/attention.h"
#include "cache/kv_layout.h"
#include "model/cpu/adapters.h"
#include "ops/activation.h"
#include "ops/cpu/expert_route.h"
#include "ops/cpu/experts.h"
#include "ops/cpu/linear.h"
#include "ops/hidden_tap.h"

namespace bequest {

struct StackNorm {
  const float* weight = nullptr;  // [H]; null: there is no norm
  const float* bias = nullptr;    // [H] of a layer norm; null: a root-mean-square norm
  float eps = 0.0f;

  bool is_there() const { return weight != nullptr; }
};

struct StackProduct {
  const void* weight;  // packed (ops/cpu/linear.h)
  WeightFormat format;
  const float* bias;  // [N], or null
  int64_t out_features;
  int64_t in_features;
  int64_t site = kNoSite;  // what adapters know it by
};

// How queries meet keys. The cache has the number of key heads and their size.
struct StackHeads {
  int64_t num_heads = 0;
  float scale = 1.0f;  // of scores, and what stored keys are to be multiplied by
  int64_t cache_layer = 0;
  int64_t strip = 0;              // whose slots and plan are meant
  const float* q_norm = nullptr;  // [D], or null
  const float* k_norm = nullptr;
  bool norms_rows = false;  // all heads of a token at once: the weights are [NQ D] and [NKV D]
  float norm_eps = 0.0f;
  const float* cos_sin = nullptr;  // [P, R] as in ops/cpu/rope.h, or null
  int64_t num_positions = 0;
  int64_t rotary_dim = 0;
  const float* query_scales = nullptr;  // [P], or null
  const float* bias = nullptr;          // on the scores, as in attention/cpu/attention.h; or null
  int64_t bias_reach = 0;
  float soft_cap = 0.0f;         // as in attention/cpu/attention.h, like the next two
  const float* sinks = nullptr;  // [NQ], or null
  float value_scale = 1.0f;
  float key_factor = 1.0f;  // as in cache/kv_write.h
  float value_factor = 1.0f;
};

struct StackAttention {
  StackProduct qkv;  // [(NQ + 2 NKV) D, H]
  StackHeads heads;
  StackProduct output;
};

struct StackCross {
  StackProduct q;  // [NQ D, H]
  StackHeads heads;
  StackProduct output;
};

struct StackFeedForward {
  StackProduct up;  // [I, H], or gate and up [2 I, H]
  Activation activation;
  StackProduct down;
  bool gated;
};

struct StackExperts {
  StackProduct router;  // [E, H]
  RoutingRule routing;
  ExpertMatrices up;  // gate and up, [2 I, H]
  Activation activation;
  ExpertMatrices down;  // [H, I]
  std::optional<StackFeedForward> shared;
  std::optional<StackProduct> shared_gate;  // [1, H]: its sigmoid is what the shared one counts
};

using StackMixer = std::variant<StackAttention, StackCross, StackFeedForward, StackExperts>;

struct StackSublayer {
  StackMixer mixer;
  StackNorm before;
  StackNorm behind;
  StackNorm after;
  float factor = 1.0f;  // of what is added
  bool beside =
      false;  // it reads what the sublayer before it read; REQUIRES: a norm before, none behind that
};

struct StackLayer {
  int32_t index;  // hidden state i is what layer i begins with
  std::vector<StackSublayer> sublayers;

  // Norms see the states between layers, or else the tap stores them where a layer begins.
  bool ends_normed() const { return sublayers.back().after.is_there(); }
};

struct LayerStack {
  int64_t hidden;
  bool narrows;  // with rows that are read, those alone pass the last layer's attention, its first sublayer
  std::vector<StackLayer> layers;
};

// Rows of a step whose results somebody reads.
struct StackRead {
  const int64_t* rows = nullptr;  // [R], ascending; null: all are read
  int64_t num_rows = 0;
  const AttentionPlan* attention = nullptr;  // of these queries alone
};

struct StackStep {
  const int32_t* positions = nullptr;  // [T]
  int64_t num_tokens = 0;
  void* kv_cache = nullptr;  // [NB, L, 2, NKV, BS, D]
  DType kv_dtype = DType::kF32;
  KvLayout layout{};
  std::vector<const int64_t*> slots;        // [T] of each strip of the cache
  std::vector<const AttentionPlan*> plans;  // of self attention, of each strip
  const AttentionPlan* cross = nullptr;     // over the same cache, or null
  StackRead read;
  HiddenTap tap{};                         // of the states between layers; its layer is set here
  const StepAdapters* adapters = nullptr;  // null: no row has one
};

// The residual is `sum`, and `added` too while that is pending.
struct StackStream {
  float* sum;                    // [T, H], contiguous
  float* added;                  // [T, H], contiguous
  bool pending;                  // whether `added` is still to be added
  int64_t num_rows;              // T; then R, if the stack has narrowed it
  int64_t num_experts_read = 0;  // by all layers, each that was used counted once per layer
};

// What a stream can begin with: rows of a table, and of another one that are added to them.
struct StackEmbedding {
  const int32_t* ids;  // [T]
  const void* table;   // packed (ops/cpu/linear.h), [V, H]
  WeightFormat format;
  int64_t vocab_size;
  float factor;       // of those rows
  const float* rows;  // by position, [P, H], or null
  int64_t num_positions;
};

// Throws on ids and positions outside the tables.
void embed_rows(const LayerStack& stack, const StackEmbedding& embedding, const StackStep& step,
                StackStream& stream);

// REQUIRES: sizes of products fit each other; the plans have T queries; the stream overlaps nothing else.
void run_layers(const LayerStack& stack, const StackStep& step, StackStream& stream);

}  // namespace bequest
