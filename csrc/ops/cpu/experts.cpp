#include "ops/cpu/experts.h"

#include <algorithm>

#include "core/check.h"
#include "ops/cpu/activation.h"
#include "ops/cpu/expert_rows.h"
#include "ops/cpu/feed_forward.h"
#include "ops/cpu/weighted_rows.h"

namespace bequest {
namespace {

bool can_gate(const ExpertMatrices& of) { return bequest::can_gate(of.format, of.out_features); }

// `both` [rows, N] is for sums that the product cannot gate.
void multiply_gated(const ExpertMatrices& of, int64_t expert, const ExpertRows& x, Activation activation,
                    float* both, float* out) {
  LinearParams product = product_of(of, expert, x, out);
  if (can_gate(of)) {
    product.finish = Finish::kGated;
    product.activation = activation;
    return linear(product);
  }
  product.out = both;
  linear(product);
  gated_activation({both, out, x.count, of.out_features / 2, activation});
}

void check_matrices(const ExpertMatrices& of) {
  check(of.num_experts >= 1 && of.out_features >= 1 && of.in_features >= 1, "experts: empty matrices");
}

int64_t floats_of_both(const ExpertMatrices& of, int64_t rows) {
  return can_gate(of) ? 0 : rows * of.out_features;
}

bool is_one_op(const ExpertsParams& p) {
  return p.gate_up.format == WeightFormat::kTiles && p.down.format == WeightFormat::kTiles &&
         can_gate(p.gate_up);
}

FeedForwardParams tiled_params(const ExpertsParams& p, int64_t expert, const ExpertRows& x, float* out) {
  const LinearParams up = product_of(p.gate_up, expert, x, nullptr);
  const LinearParams down = product_of(p.down, expert, x, out);
  return {x.data,  up.weight,      up.bias,          down.weight,       down.bias,    out,
          x.count, up.in_features, down.in_features, down.out_features, p.activation, true};
}

int64_t run_block(const ExpertsParams& p) {
  const int64_t rows = p.chosen.num_rows(), hidden = p.gate_up.in_features, inner = p.down.in_features;
  const ExpertRowGroups groups(p.chosen, p.gate_up.num_experts);
  const ScratchFloats inputs(rows * hidden), both(floats_of_both(p.gate_up, rows)), between(rows * inner);
  const ScratchFloats products(rows * p.down.out_features);
  groups.for_each_expert([&](int64_t expert) {
    const int64_t begin = groups.begin(expert);
    const ExpertRows x = gathered(groups, expert, p.x, hidden, p.chosen.top_k, inputs);
    float* const out = products.at(begin * p.down.out_features);
    if (is_one_op(p)) return feed_forward(tiled_params(p, expert, x, out));
    float* const results = between.at(begin * inner);
    multiply_gated(p.gate_up, expert, x, p.activation, both.at(begin * p.gate_up.out_features), results);
    linear(product_of(p.down, expert, {results, x.count}, out));
  });
  add_weighted_rows({products.at(0), groups.places(), p.chosen.weights, p.out, p.chosen.num_tokens,
                     p.chosen.top_k, p.down.out_features, false});
  return static_cast<int64_t>(groups.used().size());
}

}  // namespace

void expert_gated(const ExpertMatrices& gate_up, const ChosenExperts& chosen, const float* x,
                  Activation activation, float* out) {
  check_matrices(gate_up);
  check(gate_up.out_features % 2 == 0, "experts: half a row");
  const int64_t rows = chosen.num_rows(), width = gate_up.in_features, inner = gate_up.out_features / 2;
  const ExpertRowGroups groups(chosen, gate_up.num_experts);
  const ScratchFloats inputs(rows * width), both(floats_of_both(gate_up, rows)), results(rows * inner);
  groups.for_each_expert([&](int64_t expert) {
    const int64_t begin = groups.begin(expert), count = groups.count(expert);
    const ExpertRows own = gathered(groups, expert, x, width, chosen.top_k, inputs);
    float* const of_expert = results.at(begin * inner);
    multiply_gated(gate_up, expert, own, activation, both.at(begin * gate_up.out_features), of_expert);
    for (int64_t i = 0; i < count; ++i)
      std::copy_n(of_expert + i * inner, inner, out + groups.row(begin + i) * inner);
  });
}

void expert_summed(const ExpertMatrices& down, const ChosenExperts& chosen, const float* x, float* out) {
  check_matrices(down);
  const int64_t rows = chosen.num_rows(), width = down.in_features;
  const ExpertRowGroups groups(chosen, down.num_experts);
  const ScratchFloats inputs(rows * width), products(rows * down.out_features);
  groups.for_each_expert([&](int64_t expert) {
    const ExpertRows own = gathered(groups, expert, x, width, 1, inputs);
    linear(product_of(down, expert, own, products.at(groups.begin(expert) * down.out_features)));
  });
  add_weighted_rows({products.at(0), groups.places(), chosen.weights, out, chosen.num_tokens, chosen.top_k,
                     down.out_features, false});
}

int64_t experts(const ExpertsParams& p) {
  check_matrices(p.gate_up);
  check_matrices(p.down);
  check(p.gate_up.out_features == 2 * p.down.in_features && p.gate_up.in_features == p.down.out_features,
        "experts: the products do not fit each other");
  // Behind so many tokens each expert has enough rows to be worth reading again.
  constexpr int64_t kBlock = 1024;
  int64_t num_read = 0;
  for (int64_t begin = 0; begin < p.chosen.num_tokens; begin += kBlock) {
    ExpertsParams block = p;
    block.x += begin * p.gate_up.in_features;
    block.out += begin * p.down.out_features;
    block.chosen.ids += begin * p.chosen.top_k;
    block.chosen.weights += begin * p.chosen.top_k;
    block.chosen.num_tokens = std::min(kBlock, p.chosen.num_tokens - begin);
    num_read += run_block(block);
  }
  return num_read;
}

}  // namespace bequest
