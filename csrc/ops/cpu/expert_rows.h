// How the products of experts hold their rows: sorted by expert, those of one expert side by side.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "core/check.h"
#include "core/threads.h"
#include "ops/cpu/experts.h"

namespace bequest {

// ExpertRows sorted by their expert, those of one expert in their own order.
class ExpertRowGroups {
 public:
  ExpertRowGroups(const ChosenExperts& chosen, int64_t num_experts)
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
class ScratchFloats {
 public:
  explicit ScratchFloats(int64_t count)
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
struct ExpertRows {
  const float* data;
  int64_t count;
};

// Copies the rows of an expert to where they are in the order of groups; a single row stays where it is.
// `per_row` rows of the groups share a row of x.
inline ExpertRows gathered(const ExpertRowGroups& groups, int64_t expert, const float* x, int64_t width,
                           int64_t per_row, const ScratchFloats& to) {
  const int64_t begin = groups.begin(expert), count = groups.count(expert);
  if (count == 1) return {x + groups.row(begin) / per_row * width, 1};
  float* const rows = to.at(begin * width);
  for (int64_t i = 0; i < count; ++i)
    std::copy_n(x + groups.row(begin + i) / per_row * width, width, rows + i * width);
  return {rows, count};
}

inline LinearParams product_of(const ExpertMatrices& of, int64_t expert, const ExpertRows& x, float* out) {
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

}  // namespace bequest
