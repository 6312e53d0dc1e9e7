#include "model/cpu/layer_stack.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>
#include <vector>

#include "cache/cpu/kv_write.h"
#include "core/check.h"
#include "model/cpu/adapted_experts.h"
#include "ops/cpu/activation.h"
#include "ops/cpu/feed_forward.h"
#include "ops/cpu/gather.h"
#include "ops/cpu/hidden_tap.h"
#include "ops/cpu/linear_amx.h"
#include "ops/cpu/norm.h"
#include "ops/cpu/rope.h"
#include "ops/cpu/weighted_rows.h"

namespace bequest {
namespace {

// The widest rows between the kernels of a stack's layers.
struct Widths {
  int64_t projected = 0, attended = 0, inner = 0;

  void take(const StackAttention& mixer) { take(mixer.qkv, mixer.output); }
  void take(const StackCross& mixer) { take(mixer.q, mixer.output); }
  void take(const StackFeedForward& mixer) {
    inner = std::max(inner, mixer.up.out_features + mixer.down.in_features);
  }
  void take(const StackExperts& mixer) {
    if (mixer.shared) take(*mixer.shared);
  }

 private:
  void take(const StackProduct& first, const StackProduct& last) {
    projected = std::max(projected, first.out_features);
    attended = std::max(attended, last.in_features);
  }
};

// The arrays between the kernels of a step, in one piece of memory that all layers use.
class StackMemory {
 public:
  StackMemory(const LayerStack& stack, int64_t num_tokens) : num_tokens_(num_tokens) {
    Widths widths;
    for (const StackLayer& layer : stack.layers)
      for (const StackSublayer& sublayer : layer.sublayers)
        std::visit([&](const auto& mixer) { widths.take(mixer); }, sublayer.mixer);
    const int64_t sizes[] = {rounded(stack.hidden), rounded(widths.projected), rounded(widths.attended),
                             rounded(widths.inner)};
    const int64_t floats = sizes[0] + sizes[1] + sizes[2] + sizes[3];
    memory_.reset(static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(floats) * sizeof(float))));
    check(memory_ != nullptr, "layers: out of memory");
    normed = memory_.get();
    projected = normed + sizes[0];
    attended = projected + sizes[1];
    inner = attended + sizes[2];
  }

  float* normed;     // [T, H]
  float* projected;  // queries, keys and values, or queries alone
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

// How a sublayer reads the stream.
struct Reading {
  const StackNorm& norm;
  HiddenTap tap;  // of the stream
  bool is_done;   // the sublayer before it has left in memory.normed what both read
  bool stays;     // what is read must be in memory.normed, for the sublayer behind it
};

class StackRun {
 public:
  StackRun(const LayerStack& stack, const StackStep& step, StackStream& stream)
      : stack_(stack),
        step_(step),
        stream_(stream),
        memory_(stack, step.num_tokens),
        adapters_(step.adapters) {}

  void layer(const StackLayer& layer, bool narrow) {
    for (size_t i = 0; i < layer.sublayers.size(); ++i) {
      const StackSublayer& sublayer = layer.sublayers[i];
      narrow_ = narrow && i == 0;
      const bool stays = i + 1 < layer.sublayers.size() && layer.sublayers[i + 1].beside;
      check(!stays || (sublayer.before.is_there() && !sublayer.behind.is_there()),
            "layers: what two sublayers read is normed once, and nothing behind the first of them");
      // Of the states between layers one is seen by each: where a layer begins, or by the norm that ended the
      // layer before.
      const HiddenTap begin = i == 0 && !layer.ends_normed() ? tap(layer.index, false) : HiddenTap{};
      const Reading from{sublayer.before, begin, sublayer.beside, stays};
      std::visit([&](const auto& mixer) { apply(mixer, from); }, sublayer.mixer);
      stream_.pending = true;
      if (sublayer.behind.is_there()) norm_added(sublayer.behind);
      if (sublayer.factor != 1.0f) scale_added(sublayer.factor);
      const bool last = i + 1 == layer.sublayers.size();
      if (sublayer.after.is_there())
        become_normed(sublayer.after, last ? tap(layer.index + 1, true) : HiddenTap{});
    }
  }

 private:
  HiddenTap tap(int32_t layer, bool of_output) const {
    HiddenTap tap = step_.tap;
    tap.layer = layer;
    tap.store_output = of_output;
    return tap;
  }

  // --- the stream --------------------------------------------------------------------------------------

  void settle() {
    if (!stream_.pending) return;
    const int64_t count = stream_.num_rows * stack_.hidden;
    for (int64_t i = 0; i < count; ++i) stream_.sum[i] += stream_.added[i];
    stream_.pending = false;
  }

  // For a kernel that adds on its way: adding -0 changes no bit.
  void make_pending() {
    if (!stream_.pending) std::fill_n(stream_.added, stream_.num_rows * stack_.hidden, -0.0f);
    stream_.pending = true;
  }

  // normed(sum + added), or normed(sum); the sum has both then.
  void norm(const StackNorm& norm, const HiddenTap& tap) {
    const float* const x = stream_.pending ? stream_.added : stream_.sum;
    float* const residual = stream_.pending ? stream_.sum : nullptr;
    norm_rows(norm, x, residual, tap);
    stream_.pending = false;
  }

  void norm_rows(const StackNorm& norm, const float* x, float* residual, const HiddenTap& tap) const {
    const int64_t rows = stream_.num_rows, hidden = stack_.hidden;
    if (norm.bias == nullptr)
      return rms_norm({x, residual, norm.weight, memory_.normed, rows, hidden, norm.eps, tap});
    layer_norm({x, residual, norm.weight, norm.bias, memory_.normed, rows, hidden, norm.eps, tap});
  }

  void norm_added(const StackNorm& norm) {
    norm_rows(norm, stream_.added, nullptr, {});
    std::copy_n(memory_.normed, stream_.num_rows * stack_.hidden, stream_.added);
  }

  void scale_added(float factor) {
    const int64_t count = stream_.num_rows * stack_.hidden;
    for (int64_t i = 0; i < count; ++i) stream_.added[i] *= factor;
  }

  void become_normed(const StackNorm& of, const HiddenTap& tap) {
    norm(of, tap);
    std::copy_n(memory_.normed, stream_.num_rows * stack_.hidden, stream_.sum);
  }

  // What a mixer reads: the normed stream, or the stream.
  const float* read(const Reading& from) {
    if (from.norm.is_there()) {
      norm(from.norm, from.tap);
      return memory_.normed;
    }
    settle();
    if (from.is_done) return memory_.normed;
    tap_rows(stream_.sum, stream_.num_rows, stack_.hidden, from.tap);
    return stream_.sum;
  }

  // --- products ----------------------------------------------------------------------------------------

  LinearParams params(const StackProduct& product, const float* x, float* out) const {
    return {x,
            product.weight,
            product.format,
            product.bias,
            out,
            stream_.num_rows,
            product.out_features,
            product.in_features,
            product.in_features};
  }
  void multiply(const StackProduct& product, const float* x, float* out) const {
    linear(params(product, x, out));
    if (is_adapted(product)) add_deltas(product, x, out);
  }
  // Whether adapters add to it in this step: nothing can be fused with it then.
  bool is_adapted(const StackProduct& product) const {
    return adapters_ != nullptr && adapters_->is_at(product.site);
  }
  int64_t num_adapted(const StackProduct& product) const {
    return adapters_ == nullptr ? 0 : adapters_->num_rows_at(product.site);
  }
  void add_deltas(const StackProduct& product, const float* x, float* out) const {
    add_lora({x, out, product.in_features, product.out_features, product.in_features,
              adapters_->at(product.site)});
  }
  // The norm is part of a product over tiles.
  bool fuses(const StackProduct& product, const Reading& from) const {
    return product.format == WeightFormat::kTiles && from.norm.is_there() && !from.stays &&
           !is_adapted(product);
  }
  RowNorm row_norm(const Reading& from) {
    make_pending();
    return {stream_.sum, from.norm.weight, from.norm.bias, from.norm.eps, from.tap};
  }

  void project(const StackProduct& product, const Reading& from) {
    if (fuses(product, from)) {
      const RowNorm begin = row_norm(from);
      normed_linear(params(product, stream_.added, memory_.projected), begin);
      stream_.pending = false;
    } else {
      multiply(product, read(from), memory_.projected);
    }
  }

  // --- mixers: each leaves what it adds in stream.added --------------------------------------------------

  void attend(const StackHeads& heads, int64_t q_stride, const AttentionPlan& plan) const {
    check(plan.num_tokens() == stream_.num_rows, "layers: the plan is of other queries");
    paged_attention({memory_.projected, q_stride, memory_.attended, step_.kv_cache, step_.kv_dtype,
                     step_.layout, heads.cache_layer, heads.scale, heads.soft_cap, heads.bias,
                     heads.bias_reach, heads.value_scale, heads.sinks},
                    plan);
  }

  void apply(const StackAttention& mixer, const Reading& from) {
    const StackHeads& heads = mixer.heads;
    check(static_cast<size_t>(heads.strip) < step_.plans.size(), "layers: a plan is missing");
    check(step_.slots.size() == step_.plans.size(), "layers: a strip has slots and a plan");
    check(mixer.qkv.out_features == (heads.num_heads + 2 * step_.layout.num_kv_heads) * step_.layout.head_dim,
          "layers: the cache has other heads");
    const int64_t q_stride =
        stores_as_it_comes(mixer, from) ? project_into_cache(mixer, from) : project_and_store(mixer, from);
    const AttentionPlan* plan = step_.plans[static_cast<size_t>(heads.strip)];
    if (narrow_) {
      keep_read_rows(q_stride, heads.num_heads * step_.layout.head_dim, from.stays);
      plan = step_.read.attention;
    }
    attend(heads, q_stride, *plan);
    multiply(mixer.output, memory_.attended, stream_.added);
  }

  const int64_t* slots_of(const StackHeads& heads) const {
    return step_.slots[static_cast<size_t>(heads.strip)];
  }

  // Whether keys and values can go from the product to the cache.
  bool stores_as_it_comes(const StackAttention& mixer, const Reading& from) const {
    const StackHeads& heads = mixer.heads;
    return fuses(mixer.qkv, from) && heads.cos_sin == nullptr && heads.q_norm == nullptr &&
           can_store_in_cache(mixer.qkv.format, step_.kv_dtype, heads.num_heads * step_.layout.head_dim,
                              step_.layout.head_dim);
  }

  int64_t project_into_cache(const StackAttention& mixer, const Reading& from) {
    const int64_t width = mixer.heads.num_heads * step_.layout.head_dim;
    const RowNorm begin = row_norm(from);
    const KvColumns kv{width, static_cast<BFloat16*>(step_.kv_cache), step_.layout, mixer.heads.cache_layer,
                       slots_of(mixer.heads)};
    linear_into_cache(params(mixer.qkv, stream_.added, memory_.projected), kv, &begin);
    stream_.pending = false;
    return width;
  }

  int64_t project_and_store(const StackAttention& mixer, const Reading& from) {
    const StackHeads& heads = mixer.heads;
    const int64_t tokens = stream_.num_rows, head_dim = step_.layout.head_dim;
    const int64_t kv_heads = step_.layout.num_kv_heads, stride = mixer.qkv.out_features;
    project(mixer.qkv, from);
    float* const q = memory_.projected;
    float* const k = q + heads.num_heads * head_dim;
    float* const v = k + kv_heads * head_dim;
    if (heads.q_norm != nullptr) {
      norm_heads(heads, q, heads.q_norm, heads.num_heads, stride);
      norm_heads(heads, k, heads.k_norm, kv_heads, stride);
    }
    if (heads.cos_sin != nullptr)
      rotary({q, k, stride, stride, step_.positions, heads.cos_sin, tokens, heads.num_positions,
              heads.num_heads, kv_heads, head_dim, heads.rotary_dim, heads.query_scales});
    write_kv({k, v, stride, stride, slots_of(heads), tokens, step_.kv_cache, step_.kv_dtype, step_.layout,
              heads.cache_layer, heads.key_factor, heads.value_factor});
    return stride;
  }

  void norm_heads(const StackHeads& heads, float* x, const float* weight, int64_t count,
                  int64_t stride) const {
    const int64_t tokens = stream_.num_rows, head_dim = step_.layout.head_dim;
    if (heads.norms_rows)
      return head_rms_norm({x, stride, weight, tokens, 1, count * head_dim, heads.norm_eps});
    head_rms_norm({x, stride, weight, tokens, count, head_dim, heads.norm_eps});
  }

  // Queries, the stream and, where it `stays`, what was read of it move up to where the rows that are read
  // begin.
  void keep_read_rows(int64_t q_stride, int64_t q_width, bool stays) {
    const int64_t hidden = stack_.hidden;
    settle();
    for (int64_t to = 0; to < step_.read.num_rows; ++to) {
      const int64_t from = step_.read.rows[to];
      check(from >= to && from < stream_.num_rows, "layers: a row that is read is not in the step");
      if (from == to) continue;
      std::copy_n(memory_.projected + from * q_stride, q_width, memory_.projected + to * q_stride);
      std::copy_n(stream_.sum + from * hidden, hidden, stream_.sum + to * hidden);
      if (stays) std::copy_n(memory_.normed + from * hidden, hidden, memory_.normed + to * hidden);
    }
    stream_.num_rows = step_.read.num_rows;
    if (adapters_ == nullptr) return;
    narrowed_ = adapters_->of(step_.read.rows, step_.read.num_rows);
    adapters_ = &*narrowed_;
  }

  void apply(const StackCross& mixer, const Reading& from) {
    check(step_.cross != nullptr, "layers: the plan of cross attention is missing");
    check(mixer.q.out_features == mixer.heads.num_heads * step_.layout.head_dim,
          "layers: the cache has other heads");
    project(mixer.q, from);
    attend(mixer.heads, mixer.q.out_features, *step_.cross);
    multiply(mixer.output, memory_.attended, stream_.added);
  }

  static bool can_gate(const StackProduct& up) { return bequest::can_gate(up.format, up.out_features); }
  static bool is_one_op(const StackFeedForward& mixer) {
    return mixer.up.format == WeightFormat::kTiles && mixer.down.format == WeightFormat::kTiles &&
           (can_gate(mixer.up) || !mixer.gated);
  }

  void apply(const StackFeedForward& mixer, const Reading& from) {
    if (is_one_op(mixer) && fuses(mixer.up, from) && !is_adapted(mixer.down)) {
      const RowNorm begin = row_norm(from);
      // Rows are read before they are written: by the thread that normed them, or when all have been.
      return normed_feed_forward(tiled_params(mixer, stream_.added, stream_.added), begin);
    }
    feed(mixer, read(from), stream_.added);
  }

  // x [T, H] → out [T, H]
  void feed(const StackFeedForward& mixer, const float* x, float* out) const {
    const StackProduct &up = mixer.up, &down = mixer.down;
    if (is_one_op(mixer) && !is_adapted(up) && !is_adapted(down))
      return feed_forward(tiled_params(mixer, x, out));
    float* const results = memory_.inner;
    activate_up(mixer, x, results);
    multiply(down, results, out);
  }

  // x [T, H] → results [T, I]: the activation of the product with `up`, gated or not.
  void activate_up(const StackFeedForward& mixer, const float* x, float* results) const {
    const StackProduct &up = mixer.up, &down = mixer.down;
    const bool finishes = mixer.gated ? can_gate(up) : up.format == WeightFormat::kTiles;
    if (finishes && num_adapted(up) < stream_.num_rows) {
      LinearParams finished = params(up, x, results);
      finished.finish = mixer.gated ? Finish::kGated : Finish::kActivated;
      finished.activation = mixer.activation;
      linear(finished);
      if (is_adapted(up)) activate_adapted(mixer, x, results);
    } else if (!mixer.gated) {
      multiply(up, x, results);
      activate(results, stream_.num_rows * up.out_features, mixer.activation);
    } else {
      float* const both = results + stream_.num_rows * down.in_features;
      multiply(up, x, both);
      gated_activation({both, results, stream_.num_rows, down.in_features, mixer.activation});
    }
  }

  // A product that finishes its sums leaves no place for a delta in between. What it gave the rows without
  // adapters stays; those with one are computed again, so that a row's bits do not depend on its neighbours.
  void activate_adapted(const StackFeedForward& mixer, const float* x, float* results) const {
    const StackProduct& up = mixer.up;
    const int64_t inner = mixer.down.in_features;
    const AdaptedRows own = adapters_->gather(up.site, x, up.in_features);
    const int64_t count = static_cast<int64_t>(own.rows.size());
    std::vector<float> sums(static_cast<size_t>(count * up.out_features));
    LinearParams product = params(up, own.x.data(), sums.data());
    product.num_tokens = count;
    linear(product);
    add_lora({own.x.data(), sums.data(), up.in_features, up.out_features, up.in_features, own.groups});
    std::vector<float> finished(static_cast<size_t>(count * inner));
    if (mixer.gated) {
      gated_activation({sums.data(), finished.data(), count, inner, mixer.activation});
    } else {
      activate(sums.data(), count * inner, mixer.activation);
      finished.swap(sums);
    }
    for (int64_t i = 0; i < count; ++i)
      std::copy_n(finished.data() + i * inner, inner, results + own.rows[static_cast<size_t>(i)] * inner);
  }

  FeedForwardParams tiled_params(const StackFeedForward& mixer, const float* x, float* out) const {
    const StackProduct &up = mixer.up, &down = mixer.down;
    return {x,
            up.weight,
            up.bias,
            down.weight,
            down.bias,
            out,
            stream_.num_rows,
            up.in_features,
            down.in_features,
            down.out_features,
            mixer.activation,
            mixer.gated};
  }

  void apply(const StackExperts& mixer, const Reading& from) {
    const float* const x = read(from);
    const int64_t rows = stream_.num_rows, num_experts = mixer.up.num_experts, top_k = mixer.routing.top_k;
    check(mixer.router.out_features == num_experts, "layers: the router has other experts");
    std::vector<float> logits(static_cast<size_t>(rows * num_experts));
    std::vector<float> weights(static_cast<size_t>(rows * top_k));
    std::vector<int32_t> ids(weights.size());
    multiply(mixer.router, x, logits.data());
    route({logits.data(), rows, num_experts, mixer.routing, ids.data(), weights.data()});
    const ExpertsParams params{
        x, mixer.up, mixer.activation, mixer.down, {ids.data(), weights.data(), rows, top_k}, stream_.added};
    stream_.num_experts_read +=
        adapters_ == nullptr ? experts(params) : experts_with_adapters(params, *adapters_);
    if (mixer.shared) add_shared(mixer, x);
  }

  void add_shared(const StackExperts& mixer, const float* x) {
    const int64_t rows = stream_.num_rows;
    std::vector<float> given(static_cast<size_t>(rows * stack_.hidden));
    std::vector<float> logits(static_cast<size_t>(rows)), gates(logits.size(), 1.0f);
    feed(*mixer.shared, x, given.data());
    if (mixer.shared_gate) {
      multiply(*mixer.shared_gate, x, logits.data());
      make_gates(logits.data(), gates.data(), rows);
    }
    add_weighted_rows({given.data(), nullptr, gates.data(), stream_.added, rows, 1, stack_.hidden, true});
  }

  const LayerStack& stack_;
  const StackStep& step_;
  StackStream& stream_;
  const StackMemory memory_;
  const StepAdapters* adapters_;          // of the stream's rows, or null
  std::optional<StepAdapters> narrowed_;  // those, when the stream has narrowed
  bool narrow_ = false;                   // in the sublayer that is being applied
};

}  // namespace

void embed_rows(const LayerStack& stack, const StackEmbedding& embedding, const StackStep& step,
                StackStream& stream) {
  const int64_t tokens = step.num_tokens, hidden = stack.hidden;
  const bool has_positions = embedding.rows != nullptr;
  gather_rows({embedding.ids, embedding.table, embedding.format, has_positions ? stream.added : stream.sum,
               tokens, embedding.vocab_size, hidden});
  if (embedding.factor != 1.0f) {
    float* const gathered = has_positions ? stream.added : stream.sum;
    for (int64_t i = 0; i < tokens * hidden; ++i) gathered[i] *= embedding.factor;
  }
  stream.pending = has_positions;
  stream.num_rows = tokens;
  if (!has_positions) return;
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t position = step.positions[t];
    check(position >= 0 && position < embedding.num_positions, "layers: a position outside the table");
    std::copy_n(embedding.rows + position * hidden, hidden, stream.sum + t * hidden);
  }
}

void run_layers(const LayerStack& stack, const StackStep& step, StackStream& stream) {
  check(stream.num_rows == step.num_tokens, "layers: the stream has other rows than the step");
  for (const AttentionPlan* plan : step.plans) check(plan != nullptr, "layers: a plan is missing");
  const bool narrow = stack.narrows && step.read.rows != nullptr;
  check(!narrow || step.read.attention != nullptr, "layers: a plan is missing");
  if (step.num_tokens == 0) return;
  StackRun run(stack, step, stream);
  for (const StackLayer& layer : stack.layers) run.layer(layer, narrow && &layer == &stack.layers.back());
}

}  // namespace bequest
