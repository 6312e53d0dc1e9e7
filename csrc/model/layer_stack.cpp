#include "model/layer_stack.h"

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "cache/cpu/kv_write.h"
#include "core/check.h"
#include "ops/cpu/activation.h"
#include "ops/cpu/feed_forward.h"
#include "ops/cpu/gather.h"
#include "ops/cpu/linear_amx.h"
#include "ops/cpu/norm.h"

namespace bequest {
namespace {

// The arrays between the kernels of a step, in one piece of memory that all layers use.
class StackMemory {
 public:
  StackMemory(const LayerStack& stack, int64_t num_tokens) : num_tokens_(num_tokens) {
    const int64_t width = stack.num_heads * stack.head_dim;
    int64_t widest_inner = 0;
    for (const StackLayer& layer : stack.layers)
      widest_inner = std::max(widest_inner, layer.up.out_features + layer.down.in_features);
    const int64_t widths[] = {stack.hidden, 3 * width, width, widest_inner};
    int64_t floats = 0;
    for (const int64_t each : widths) floats += rounded(each);
    memory_.reset(static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(floats) * sizeof(float))));
    check(memory_ != nullptr, "layers: out of memory");
    normed = memory_.get();
    projected = normed + rounded(widths[0]);
    attended = projected + rounded(widths[1]);
    inner = attended + rounded(widths[2]);
  }

  float* normed;     // [T, H]
  float* projected;  // [T, 3 NQ D], or queries alone
  float* attended;   // [T, NQ D]
  float* inner;      // of a feed-forward layer that is not one op

 private:
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  int64_t rounded(int64_t width) const { return (num_tokens_ * width + 15) / 16 * 16; }

  int64_t num_tokens_;
  std::unique_ptr<float, Free> memory_;
};

class StackRun {
 public:
  StackRun(const LayerStack& stack, const StackStep& step)
      : stack_(stack), step_(step), memory_(stack, step.num_tokens) {}

  void layer(int64_t index) {
    const StackLayer& layer = stack_.layers[static_cast<size_t>(index)];
    HiddenTap tap = step_.tap;
    tap.layer = static_cast<int32_t>(index);
    attend_self(layer, stack_.has_cross ? index : 0, tap);
    if (stack_.has_cross) attend_cross(layer, index);
    feed_forward(layer);
  }

 private:
  void norm(const StackNorm& norm, const HiddenTap& tap) const {
    const int64_t tokens = step_.num_tokens, hidden = stack_.hidden;
    if (norm.bias == nullptr)
      return rms_norm({step_.added, step_.sum, norm.weight, memory_.normed, tokens, hidden, norm.eps, tap});
    layer_norm(
        {step_.added, step_.sum, norm.weight, norm.bias, memory_.normed, tokens, hidden, norm.eps, tap});
  }

  LinearParams params(const StackProduct& product, const float* x, float* out) const {
    return {x,
            product.weight,
            product.format,
            product.bias,
            out,
            step_.num_tokens,
            product.out_features,
            product.in_features,
            product.in_features};
  }
  void multiply(const StackProduct& product, const float* x, float* out) const {
    linear(params(product, x, out));
  }
  // The norm is part of a product over tiles.
  RowNorm row_norm(const StackNorm& of, const HiddenTap& tap) const {
    return {step_.sum, of.weight, of.bias, of.eps, tap};
  }

  void attend(const float* q, int64_t q_stride, int64_t layer, const AttentionPlan& plan, const float* bias,
              int64_t reach) const {
    check(plan.num_tokens() == step_.num_tokens, "layers: the plan is of other queries");
    paged_attention({q, q_stride, memory_.attended, step_.kv_cache, step_.kv_dtype, step_.layout, layer,
                     stack_.scale, 0.0f, bias, reach, 1.0f},
                    plan);
  }

  void attend_self(const StackLayer& layer, int64_t cache_layer, const HiddenTap& tap) const {
    const int64_t width = stack_.num_heads * stack_.head_dim;
    int64_t stride = width;  // of queries
    if (can_store_in_cache(layer.qkv.format, step_.kv_dtype, width, stack_.head_dim)) {
      const RowNorm begin = row_norm(layer.attention_norm, tap);
      const KvColumns kv{width, static_cast<BFloat16*>(step_.kv_cache), step_.layout, cache_layer,
                         step_.slots};
      linear_into_cache(params(layer.qkv, step_.added, memory_.projected), kv, &begin);
    } else {
      stride = 3 * width;
      norm(layer.attention_norm, tap);
      multiply(layer.qkv, memory_.normed, memory_.projected);
      write_kv({memory_.projected + width, memory_.projected + 2 * width, stride, stride, step_.slots,
                step_.num_tokens, step_.kv_cache, step_.kv_dtype, step_.layout, cache_layer});
    }
    attend(memory_.projected, stride, cache_layer, *step_.attention, step_.bias, step_.bias_reach);
    multiply(layer.attention_output, memory_.attended, step_.added);
  }

  void attend_cross(const StackLayer& layer, int64_t cache_layer) const {
    if (layer.cross_q.format == WeightFormat::kTiles) {
      normed_linear(params(layer.cross_q, step_.added, memory_.projected), row_norm(layer.cross_norm, {}));
    } else {
      norm(layer.cross_norm, {});
      multiply(layer.cross_q, memory_.normed, memory_.projected);
    }
    attend(memory_.projected, stack_.num_heads * stack_.head_dim, cache_layer, *step_.cross, nullptr, 0);
    multiply(layer.cross_output, memory_.attended, step_.added);
  }

  void feed_forward(const StackLayer& layer) const {
    const StackProduct &up = layer.up, &down = layer.down;
    const bool tiles = up.format == WeightFormat::kTiles;
    const bool codes = up.format == WeightFormat::kQ4 || up.format == WeightFormat::kQ8;
    const bool can_gate =
        (tiles || codes) && up.out_features % (2 * (tiles ? kStripWidth : kPanelWidth)) == 0;
    if (tiles && (can_gate || !stack_.gated)) return feed_forward_in_tiles(layer);
    norm(layer.inner_norm, {});
    float* const results = memory_.inner;
    if (!stack_.gated) {
      multiply(up, memory_.normed, results);
      activate(results, step_.num_tokens * up.out_features, stack_.activation);
    } else if (can_gate) {
      LinearParams gating = params(up, memory_.normed, results);
      gating.finish = Finish::kGated;
      gating.activation = stack_.activation;
      linear(gating);
    } else {
      float* const both = results + step_.num_tokens * down.in_features;
      multiply(up, memory_.normed, both);
      gated_activation({both, results, step_.num_tokens, down.in_features, stack_.activation});
    }
    multiply(down, results, step_.added);
  }

  void feed_forward_in_tiles(const StackLayer& layer) const {
    const StackProduct &up = layer.up, &down = layer.down;
    // Rows are read before they are written: by the thread that normed them, or when all have been.
    normed_feed_forward(
        {step_.added, up.weight, up.bias, down.weight, down.bias, step_.added, step_.num_tokens,
         up.in_features, down.in_features, down.out_features, stack_.activation, stack_.gated},
        row_norm(layer.inner_norm, {}));
  }

  const LayerStack& stack_;
  const StackStep& step_;
  const StackMemory memory_;
};

}  // namespace

void embed_rows(const LayerStack& stack, const StackEmbedding& embedding, const StackStep& step) {
  const int64_t tokens = step.num_tokens, hidden = stack.hidden;
  gather_rows(
      {embedding.ids, embedding.table, embedding.format, step.added, tokens, embedding.vocab_size, hidden});
  if (embedding.rows == nullptr) {
    std::fill_n(step.sum, tokens * hidden, 0.0f);
    return;
  }
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t position = embedding.positions[t];
    check(position >= 0 && position < embedding.num_positions, "layers: a position outside the table");
    std::copy_n(embedding.rows + position * hidden, hidden, step.sum + t * hidden);
  }
}

void run_layers(const LayerStack& stack, const StackStep& step) {
  check(step.attention != nullptr && (step.cross != nullptr) == stack.has_cross, "layers: a plan is missing");
  check(step.layout.num_kv_heads == stack.num_heads && step.layout.head_dim == stack.head_dim,
        "layers: the cache has other heads");
  if (step.num_tokens == 0) return;
  StackRun run(stack, step);
  const auto num_layers = static_cast<int64_t>(stack.layers.size());
  for (int64_t index = 0; index < num_layers; ++index) run.layer(index);
}

}  // namespace bequest
