#include "ops/cpu/experts.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "core/check.h"
#include "core/threads.h"
#include "ops/cpu/activation.h"
#include "ops/cpu/feed_forward.h"
#include "ops/cpu/weighted_rows.h"

namespace bequest {
namespace {

// Rows sorted by their expert, those of one expert in their own order.
class RowGroups {
 public:
  RowGroups(const ChosenExperts& chosen, int64_t num_experts)
      : starts_(static_cast<size_t>(num_experts) + 1),
        rows_(static_cast<size_t>(chosen.num_rows())),
        places_(rows_.size()) {
    for (size_t row = 0; row < rows_.size(); ++row) {
      const int32_t expert = chosen.ids[row];
      check(expert >= 0 && expert < num_experts, "experts: the number of an expert is outside");
      ++starts_[static_cast<size_t>(expert) + 1];
    }
    for (size_t expert = 0; expert + 1 < starts_.size(); ++expert) {
      if (starts_[expert + 1] > 0) used_.push_back(static_cast<int64_t>(expert));
      starts_[expert + 1] += starts_[expert];
    }
    std::vector<int64_t> next(starts_.begin(), starts_.end() - 1);
    for (size_t row = 0; row < rows_.size(); ++row) {
      const int64_t place = next[static_cast<size_t>(chosen.ids[row])]++;
      rows_[static_cast<size_t>(place)] = static_cast<int32_t>(row);
      places_[row] = static_cast<int32_t>(place);
    }
  }

  const std::vector<int64_t>& used() const { return used_; }
  int64_t begin(int64_t expert) const { return starts_[static_cast<size_t>(expert)]; }
  int64_t count(int64_t expert) const { return begin(expert + 1) - begin(expert); }
  int64_t row(int64_t place) const { return rows_[static_cast<size_t>(place)]; }
  const int32_t* places() const { return places_.data(); }  // [T top_k]: where a row is in this order

  // f(expert) for each that is used: each by one thread, or by all of them where some have too much to do.
  template <class F>
  void for_each_expert(F f) const {
    constexpr int64_t kReading = 8;  // reading a matrix takes as long as so many rows
    int64_t most = 0, total = 0;
    for (const int64_t expert : used_) {
      most = std::max(most, count(expert) + kReading);
      total += count(expert) + kReading;
    }
    if (most * 2 * num_threads() > total) {
      for (const int64_t expert : used_) f(expert);
    } else {
      for_each_item(static_cast<int64_t>(used_.size()),
                    [&](int64_t i, int) { f(used_[static_cast<size_t>(i)]); });
    }
  }

 private:
  std::vector<int64_t> starts_, used_;
  std::vector<int32_t> rows_, places_;
};

// Memory of one call; malloc keeps what the last call freed.
class Floats {
 public:
  explicit Floats(int64_t count)
      : memory_(static_cast<float*>(
            std::aligned_alloc(64, static_cast<size_t>((count * 4 + 63) / 64 * 64 + 64)))) {
    check(memory_ != nullptr, "experts: out of memory");
  }
  float* at(int64_t index) const { return memory_.get() + index; }

 private:
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  std::unique_ptr<float, Free> memory_;
};

// The rows of one expert.
struct Rows {
  const float* data;
  int64_t count;
};

// Copies the rows of an expert to where they are in the order of groups; a single row stays where it is.
// `per_row` rows of the groups share a row of x.
Rows gathered(const RowGroups& groups, int64_t expert, const float* x, int64_t width, int64_t per_row,
              const Floats& to) {
  const int64_t begin = groups.begin(expert), count = groups.count(expert);
  if (count == 1) return {x + groups.row(begin) / per_row * width, 1};
  float* const rows = to.at(begin * width);
  for (int64_t i = 0; i < count; ++i)
    std::copy_n(x + groups.row(begin + i) / per_row * width, width, rows + i * width);
  return {rows, count};
}

LinearParams product_of(const ExpertMatrices& of, int64_t expert, const Rows& x, float* out) {
  return {.x = x.data,
          .weight = of.data + expert * of.stride,
          .format = of.format,
          .bias = of.bias == nullptr ? nullptr : of.bias + expert * of.out_features,
          .out = out,
          .num_tokens = x.count,
          .out_features = of.out_features,
          .in_features = of.in_features,
          .x_stride = of.in_features};
}

bool can_gate(const ExpertMatrices& of) { return bequest::can_gate(of.format, of.out_features); }

// `both` [rows, N] is for sums that the product cannot gate.
void multiply_gated(const ExpertMatrices& of, int64_t expert, const Rows& x, Activation activation,
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

FeedForwardParams tiled_params(const ExpertsParams& p, int64_t expert, const Rows& x, float* out) {
  const LinearParams up = product_of(p.gate_up, expert, x, nullptr);
  const LinearParams down = product_of(p.down, expert, x, out);
  return {x.data,  up.weight,      up.bias,          down.weight,       down.bias,    out,
          x.count, up.in_features, down.in_features, down.out_features, p.activation, true};
}

int64_t run_block(const ExpertsParams& p) {
  const int64_t rows = p.chosen.num_rows(), hidden = p.gate_up.in_features, inner = p.down.in_features;
  const RowGroups groups(p.chosen, p.gate_up.num_experts);
  const Floats inputs(rows * hidden), both(floats_of_both(p.gate_up, rows)), between(rows * inner);
  const Floats products(rows * p.down.out_features);
  groups.for_each_expert([&](int64_t expert) {
    const int64_t begin = groups.begin(expert);
    const Rows x = gathered(groups, expert, p.x, hidden, p.chosen.top_k, inputs);
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
  const RowGroups groups(chosen, gate_up.num_experts);
  const Floats inputs(rows * width), both(floats_of_both(gate_up, rows)), results(rows * inner);
  groups.for_each_expert([&](int64_t expert) {
    const int64_t begin = groups.begin(expert), count = groups.count(expert);
    const Rows own = gathered(groups, expert, x, width, chosen.top_k, inputs);
    float* const of_expert = results.at(begin * inner);
    multiply_gated(gate_up, expert, own, activation, both.at(begin * gate_up.out_features), of_expert);
    for (int64_t i = 0; i < count; ++i)
      std::copy_n(of_expert + i * inner, inner, out + groups.row(begin + i) * inner);
  });
}

void expert_summed(const ExpertMatrices& down, const ChosenExperts& chosen, const float* x, float* out) {
  check_matrices(down);
  const int64_t rows = chosen.num_rows(), width = down.in_features;
  const RowGroups groups(chosen, down.num_experts);
  const Floats inputs(rows * width), products(rows * down.out_features);
  groups.for_each_expert([&](int64_t expert) {
    const Rows own = gathered(groups, expert, x, width, 1, inputs);
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
