// Few rows read codes and make operands of them in registers. For many rows a strip of panels is made
// operands once, in L2, and all tiles of rows pass over it.
#include "ops/cpu/linear_integer.h"
#include "ops/cpu/integer_tiles.h"
#include "ops/cpu/quantised_columns.h"

namespace bequest::BEQUEST_ISA {
namespace {

constexpr int64_t kBlockRows = 256;   // that pass over a strip
constexpr int64_t kStripPanels = 4;   // a multiple of those of a tile
constexpr int64_t kStripGroups = 64;  // at most: a strip stays in L2

// Rows that read codes, and panels at once for so many; rows and panels of a tile over a strip. Registers
// hold sums of integers and of floats.
#if defined(BEQUEST_ISA_avx512)
constexpr int kFewRows = 8;
constexpr int few_panels(int rows) { return rows <= 2 ? 4 : rows <= 4 ? 2 : 1; }
constexpr int kStripRows = 6, kLeastRows = 3, kTileWidth = 2;
#elif defined(BEQUEST_ISA_avx2)
constexpr int kFewRows = 3;
constexpr int few_panels(int) { return 1; }
constexpr int kStripRows = 3, kLeastRows = 2, kTileWidth = 1;
#elif defined(BEQUEST_DOT_dotprod)
constexpr int kFewRows = 2;
constexpr int few_panels(int) { return 1; }
constexpr int kStripRows = 4, kLeastRows = 2, kTileWidth = 1;
#else
constexpr int kFewRows = 3;
constexpr int few_panels(int) { return 1; }
constexpr int kStripRows = 3, kLeastRows = 2, kTileWidth = 1;
#endif

struct Product {
  const LinearParams& p;
  const IntegerRows& x;

  int64_t groups() const { return p.in_features / kGroup; }

  // What is multiplied for panel `j` of some columns, both halves counted.
  template <class Columns>
  IntegerTile tile(const Columns& at, int64_t row, int64_t j, Span g) const {
    const int64_t place = row * groups() + g.begin;
    return {.x = x.words + place * kBlockWords,
            .steps = x.steps + place * 2,
            .row_groups = groups(),
            .groups = g.end - g.begin,
            .resumes = g.begin > 0,
            .bias = at.bias() && g.end == groups() ? at.bias() + j * kPanelWidth : nullptr,
            .c = at.sums(row) + j * kPanelWidth,
            .c_stride = at.stride()};
  }
};

// Panels [j, end) of some columns, P at a time, then one by one. weights<P>(j) shows them.
template <int R, int P, class Columns, class F>
void multiply_panels(const Product& product, const Columns& at, int64_t row, Span panels, Span g, F weights) {
  int64_t j = panels.begin;
  for (; j + P <= panels.end && (j + P) * kPanelWidth <= at.columns(); j += P)
    multiply_groups<R, P>(product.tile(at, row, j, g), weights.template operator()<P>(j));
  for (; j < panels.end; ++j) {
    const IntegerTile t = product.tile(at, row, j, g);
    const int64_t columns = at.columns() - j * kPanelWidth;
    if (columns >= kPanelWidth) {
      multiply_groups<R, 1>(t, weights.template operator()<1>(j));
    } else {
      multiply_last<R>(t, columns, weights.template operator()<1>(j));
    }
  }
}

template <class Codes, class Columns>
void multiply_few(const Product& product, const QuantisedItem& item, float* scratch) {
  const LinearParams& p = product.p;
  const CodePanels<Codes> codes(p);
  const Span rows{item.row_begin, item.row_end};
  with_rows<few_rows<Codes>(kFewRows)>(rows.end - rows.begin, [&]<int R>() {
    constexpr int kMost = few_panels(R);
    const int64_t step = Columns::kHalves == 2 ? kMost : item.panel_end - item.panel_begin;
    for (int64_t begin = item.panel_begin; begin < item.panel_end; begin += step) {
      const int64_t count = begin + step < item.panel_end ? step : item.panel_end - begin;
      const Columns at(p, begin, count, rows, scratch);
      for (int half = 0; half < Columns::kHalves; ++half) {
        const int64_t shift = at.panel(half) - half * count;
        multiply_panels<R, kMost>(product, at, rows.begin, {half * count, (half + 1) * count},
                                  {0, product.groups()},
                                  [&]<int P>(int64_t j) { return codes.template from<P>(shift + j); });
      }
      at.finish(rows);
    }
  });
}

template <class Codes, class Columns>
void multiply_many(const Product& product, const QuantisedItem& item, float* scratch) {
  using Group = OperandGroup<Codes>;
  const LinearParams& p = product.p;
  const CodePanels<Codes> codes(p);
  const int64_t step = kStripPanels / Columns::kHalves;
  const int64_t passes = (product.groups() + kStripGroups - 1) / kStripGroups;
  const int64_t rows = item.row_end - item.row_begin, tiles = (rows + kStripRows - 1) / kStripRows;
  auto* const strip = reinterpret_cast<Group*>(scratch);
  float* const sums = scratch + kStripPanels * kStripGroups * sizeof(Group) / sizeof(float);
  for (int64_t begin = item.panel_begin; begin < item.panel_end; begin += step) {
    const int64_t count = begin + step < item.panel_end ? step : item.panel_end - begin;
    const Columns at(p, begin, count, {item.row_begin, item.row_end}, sums);
    for (int64_t i = 0; i < passes; ++i) {
      const Span g = part_of(product.groups(), passes, i);
      const int64_t depth = g.end - g.begin;
      for (int half = 0; half < Columns::kHalves; ++half)
        for (int64_t j = 0; j < count; ++j)
          codes.expand(at.panel(half) + j, g, strip + (half * count + j) * depth);
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const Span span = part_of(rows, tiles, tile);
        const int64_t row = item.row_begin + span.begin;
        with_rows<kStripRows, kLeastRows>(span.end - span.begin, [&]<int R>() {
          multiply_panels<R, kTileWidth>(
              product, at, row, {0, Columns::kHalves * count}, g,
              [&]<int P>(int64_t j) { return OperandPanels<Codes>{strip + j * depth, depth}; });
        });
        if (g.end == product.groups()) at.finish({row, item.row_begin + span.end});
      }
    }
  }
}

template <class Columns>
void multiply_columns(const Product& product, const QuantisedItem& item, float* scratch) {
  with_codes(product.p.format, [&]<class Codes>() {
    product.p.num_tokens <= few_rows<Codes>(kFewRows) ? multiply_few<Codes, Columns>(product, item, scratch)
                                                      : multiply_many<Codes, Columns>(product, item, scratch);
  });
}

}  // namespace

QuantisedCut integer_cut(const LinearParams& p) {
  const auto sums = [&](int64_t rows) {
    return p.gated() ? rows * 2 * kMostGated * kPanelWidth * int64_t{sizeof(float)} : 0;
  };
  int64_t few = 0, group_bytes = 0;
  with_codes(p.format, [&]<class Codes>() {
    few = few_rows<Codes>(kFewRows);
    group_bytes = sizeof(OperandGroup<Codes>);
  });
  if (p.num_tokens <= few)
    return {.rows = few, .panels = few_panels(static_cast<int>(p.num_tokens)), .scratch_bytes = sums(few)};
  return {.rows = kBlockRows,
          .panels = p.gated() ? kStripPanels / 2 : kStripPanels,
          .scratch_bytes = kStripPanels * kStripGroups * group_bytes + sums(kBlockRows)};
}

void multiply_integer(const LinearParams& p, const IntegerRows& x, const QuantisedItem& item,
                      float* scratch) {
  const Product product{p, x};
  if (!p.gated()) return multiply_columns<PlainColumns>(product, item, scratch);
  with_activation(p.activation,
                  [&]<class F>() { multiply_columns<GatedColumns<F>>(product, item, scratch); });
}

}  // namespace bequest::BEQUEST_ISA
