#include "model/cpu/adapted_experts.h"

#include <algorithm>
#include <vector>

#include "ops/cpu/activation.h"
#include "ops/cpu/expert_rows.h"
#include "ops/cpu/weighted_rows.h"

namespace bequest {
namespace {

// Some tokens of a step, in memory of their own.
class SomeTokens {
 public:
  SomeTokens(const ExpertsParams& p, const std::vector<int64_t>& tokens) : tokens_(tokens), params_(p) {
    const int64_t hidden = p.gate_up.in_features, top_k = p.chosen.top_k;
    for (const int64_t token : tokens) {
      x_.insert(x_.end(), p.x + token * hidden, p.x + (token + 1) * hidden);
      ids_.insert(ids_.end(), p.chosen.ids + token * top_k, p.chosen.ids + (token + 1) * top_k);
      weights_.insert(weights_.end(), p.chosen.weights + token * top_k,
                      p.chosen.weights + (token + 1) * top_k);
    }
    out_.resize(x_.size());
    params_.x = x_.data();
    params_.chosen = {ids_.data(), weights_.data(), static_cast<int64_t>(tokens.size()), top_k};
    params_.out = out_.data();
  }
  SomeTokens(const SomeTokens&) = delete;
  SomeTokens& operator=(const SomeTokens&) = delete;

  const ExpertsParams& params() const { return params_; }

  void put_back(float* out) const {
    const int64_t hidden = params_.gate_up.in_features;
    for (size_t i = 0; i < tokens_.size(); ++i)
      std::copy_n(out_.data() + static_cast<int64_t>(i) * hidden, hidden, out + tokens_[i] * hidden);
  }

 private:
  const std::vector<int64_t>& tokens_;
  std::vector<float> x_, weights_, out_;
  std::vector<int32_t> ids_;
  ExpertsParams params_;
};

// Tokens that have adapters, those of one adapter side by side.
class AdaptedTokens {
 public:
  explicit AdaptedTokens(const std::vector<StepAdapters::Group>& groups) {
    for (const StepAdapters::Group& group : groups) {
      tokens_.insert(tokens_.end(), group.rows.begin(), group.rows.end());
      adapters_.insert(adapters_.end(), group.rows.size(), group.adapter);
    }
  }

  const std::vector<int64_t>& tokens() const { return tokens_; }

  std::vector<int64_t> others(int64_t num_tokens) const {
    std::vector<bool> is_here(static_cast<size_t>(num_tokens));
    for (const int64_t token : tokens_) is_here[static_cast<size_t>(token)] = true;
    std::vector<int64_t> found;
    for (int64_t token = 0; token < num_tokens; ++token)
      if (!is_here[static_cast<size_t>(token)]) found.push_back(token);
    return found;
  }

  // To the products y of an expert, whose rows are of these tokens from `first` on, in their order: so rows
  // of one adapter follow each other.
  void add(const ExpertMatrices& of, int64_t expert, const ExpertRowGroups& groups, int64_t top_k,
           int64_t first, const ExpertRows& x, float* y) const {
    const int64_t begin = groups.begin(expert);
    const auto adapter_of = [&](int64_t place) {
      return adapters_[static_cast<size_t>(first + groups.row(begin + place) / top_k)];
    };
    std::vector<int64_t> places(static_cast<size_t>(x.count));
    for (int64_t i = 0; i < x.count; ++i) places[static_cast<size_t>(i)] = i;
    std::vector<LoraRows> found;
    for (int64_t i = 0; i < x.count;) {
      int64_t end = i + 1;
      while (end < x.count && adapter_of(end) == adapter_of(i)) ++end;
      const Adapter::Parts* const parts = adapter_of(i)->at(of.site + expert);
      if (parts != nullptr) found.push_back({parts, places.data() + i, end - i});
      i = end;
    }
    add_lora({x.data, y, of.in_features, of.out_features, of.in_features, found});
  }

 private:
  std::vector<int64_t> tokens_;
  std::vector<const Adapter*> adapters_;  // of each
};

// Tokens from `first` on among those that have adapters.
int64_t run_block(const ExpertsParams& p, const AdaptedTokens& adapted, int64_t first) {
  const ExpertMatrices &up = p.gate_up, &down = p.down;
  const int64_t rows = p.chosen.num_rows(), inner = down.in_features, top_k = p.chosen.top_k;
  const ExpertRowGroups groups(p.chosen, up.num_experts);
  const ScratchFloats inputs(rows * up.in_features), both(rows * up.out_features), between(rows * inner);
  const ScratchFloats products(rows * down.out_features);
  groups.for_each_expert([&](int64_t expert) {
    const int64_t begin = groups.begin(expert);
    const ExpertRows x = gathered(groups, expert, p.x, up.in_features, top_k, inputs);
    const ExpertRows results{between.at(begin * inner), x.count};
    float* const sums = both.at(begin * up.out_features);
    linear(product_of(up, expert, x, sums));
    if (up.site != kNoSite) adapted.add(up, expert, groups, top_k, first, x, sums);
    gated_activation({sums, between.at(begin * inner), x.count, inner, p.activation});
    float* const out = products.at(begin * down.out_features);
    linear(product_of(down, expert, results, out));
    if (down.site != kNoSite) adapted.add(down, expert, groups, top_k, first, results, out);
  });
  add_weighted_rows({products.at(0), groups.places(), p.chosen.weights, p.out, p.chosen.num_tokens, top_k,
                     down.out_features, false});
  return static_cast<int64_t>(groups.used().size());
}

}  // namespace

int64_t experts_with_adapters(const ExpertsParams& p, const StepAdapters& adapters) {
  const AdaptedTokens adapted(adapters.among(p.gate_up.site, p.down.site));
  if (adapted.tokens().empty()) return experts(p);
  int64_t num_read = 0;
  if (const std::vector<int64_t> others = adapted.others(p.chosen.num_tokens); !others.empty()) {
    const SomeTokens plain(p, others);
    num_read = experts(plain.params());
    plain.put_back(p.out);
  }
  const SomeTokens own(p, adapted.tokens());
  constexpr int64_t kBlock = 1024;  // as experts() cuts them
  for (int64_t begin = 0; begin < own.params().chosen.num_tokens; begin += kBlock) {
    ExpertsParams block = own.params();
    block.x += begin * p.gate_up.in_features;
    block.out += begin * p.down.out_features;
    block.chosen.ids += begin * p.chosen.top_k;
    block.chosen.weights += begin * p.chosen.top_k;
    block.chosen.num_tokens = std::min(kBlock, block.chosen.num_tokens - begin);
    num_read += run_block(block, adapted, begin);
  }
  own.put_back(p.out);
  return num_read;
}

}  // namespace bequest
