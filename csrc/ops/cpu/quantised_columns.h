// The columns of a product over codes: where their weights are and where their sums go; for files that are
// compiled per instruction set.
#pragma once

#include "ops/cpu/activation_functions.h"
#include "ops/cpu/linear_tiles.h"

namespace bequest::BEQUEST_ISA {
namespace {

constexpr int64_t kMostGated = 4;  // panels of a gate at a time, at most

// f<R>() for R = rows, which is at least Least and at most Most.
template <int Most, int Least = 1, class F>
void with_rows(int64_t rows, F f) {
  if constexpr (Most > Least) {
    if (rows < Most) return with_rows<Most - 1, Least>(rows, f);
  }
  f.template operator()<Most>();
}

// Some columns of the product: where their weights are and where their sums go. Plain ones are columns of the
// output.
struct PlainColumns {
  static constexpr int kHalves = 1;
  const LinearParams& p;
  int64_t first_panel;
  int64_t panels;  // of a half

  PlainColumns(const LinearParams& params, int64_t first, int64_t count, Span, float*)
      : p(params), first_panel(first), panels(count) {}

  int64_t panel(int) const { return first_panel; }  // the first of a half
  int64_t columns() const { return p.out_features - first_panel * kPanelWidth; }
  float* sums(int64_t row) const { return p.out + row * p.out_features + first_panel * kPanelWidth; }
  int64_t stride() const { return p.out_features; }
  const float* bias() const { return p.bias ? p.bias + first_panel * kPanelWidth : nullptr; }
  void finish(Span) const {}
};

// Gated ones are some of the gate, then as many of the other half; their sums stay in L2.
template <class F>
struct GatedColumns {
  static constexpr int kHalves = 2;
  const LinearParams& p;
  int64_t first_panel;
  int64_t panels;
  Span rows;  // of the sums
  float* scratch;
  float both_biases[2 * kMostGated * kPanelWidth];

  GatedColumns(const LinearParams& params, int64_t first, int64_t count, Span span, float* memory)
      : p(params), first_panel(first), panels(count), rows(span), scratch(memory) {
    if (!p.bias) return;
    for (int half = 0; half < 2; ++half)
      std::memcpy(both_biases + half * panels * kPanelWidth, p.bias + panel(half) * kPanelWidth,
                  panels * kPanelWidth * sizeof(float));
  }

  int64_t panel(int half) const { return first_panel + half * (p.out_features / (2 * kPanelWidth)); }
  int64_t columns() const { return 2 * panels * kPanelWidth; }
  float* sums(int64_t row) const { return scratch + (row - rows.begin) * stride(); }
  int64_t stride() const { return 2 * panels * kPanelWidth; }
  const float* bias() const { return p.bias ? both_biases : nullptr; }
  void finish(Span done) const {
    const int64_t width = panels * kPanelWidth;
    for (int64_t row = done.begin; row < done.end; ++row)
      gate_row<F>(sums(row), sums(row) + width,
                  p.out + row * (p.out_features / 2) + first_panel * kPanelWidth, width);
  }
};

// Panels [j, end) in blocks of P, the last ones fewer; f<P>(j, whole): whether all of its columns are there.
template <int P, class F>
void each_block(int64_t columns, int64_t j, int64_t end, F f) {
  for (; j + P <= end; j += P) {
    if ((j + P) * kPanelWidth > columns) break;
    f.template operator()<P>(j, true);
  }
  if constexpr (P > 1) {
    if (j < end) each_block<P - 1>(columns, j, end, f);
  } else if (j < end) {
    f.template operator()<1>(j, false);
  }
}

}  // namespace
}  // namespace bequest::BEQUEST_ISA
