// Few rows read codes and make operands of them in registers. For many rows a strip of panels is made
// operands once, in L2, and all tiles of rows pass over it.
#include "ops/cpu/linear_integer.h"
#include "core/dot_products.h"
#include "ops/cpu/quantised_columns.h"
#include "ops/cpu/quantised_operands.h"

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
#else
constexpr int kFewRows = 3;
constexpr int few_panels(int) { return 1; }
constexpr int kStripRows = 3, kLeastRows = 2, kTileWidth = 1;
#endif

// What a tile multiplies, and where its sums go.
struct IntegerTile {
  const uint32_t* x;   // [R, groups, 16]
  const float* steps;  // [R, groups, 2]
  int64_t row_groups;  // from one row to the next
  int64_t groups;
  bool resumes;       // starts from the sums in c
  const float* bias;  // [16 P], with the last group; or null
  float* c;           // [R, 16 P], rows c_stride apart
  int64_t c_stride;
};

// c [R, 16 P] = x · weightsᵀ, where `weights` shows a group of P panels at a time.
template <int R, int P, class Weights>
void multiply_groups(const IntegerTile& t, Weights weights) {
  constexpr int kScales = Weights::kScales, kOperands = kGroupOperands / kScales;
  VecF sum[R][P][kVecs];
  const auto each = [&](auto f) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int j = 0; j < P; ++j)
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v)
          f(sum[r][j][v], r, j, v, t.c + r * t.c_stride + j * kPanelWidth + v * kLanes);
  };
  each([&](VecF& s, int, int, int, const float* c) { s = t.resumes ? load(c) : VecF{}; });
  for (int64_t g = 0; g < t.groups; ++g) {
    weights.open(g);
    const uint32_t* const x = t.x + g * kBlockWords;
    const float* const steps = t.steps + 2 * g;
#pragma GCC unroll 2
    for (int part = 0; part < kScales; ++part) {
      DotSum dots[R][P][kVecs];
#pragma GCC unroll 16
      for (int o = part * kOperands; o < (part + 1) * kOperands; ++o) {
        VecU operand[P][kVecs];
#pragma GCC unroll 8
        for (int j = 0; j < P; ++j)
#pragma GCC unroll 4
          for (int v = 0; v < kVecs; ++v) operand[j][v] = weights.operand(j, o, v);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
          for (int j = 0; j < P; ++j)
#pragma GCC unroll 4
            for (int v = 0; v < kVecs; ++v)
              dots[r][j][v].add(operand[j][v], x + r * t.row_groups * kBlockWords + o * DotSum::kWords);
      }
      each([&](VecF& s, int r, int j, int v, const float*) {
        const VecF scaled = __builtin_convertvector(dots[r][j][v].total(), VecF) * weights.scale(j, part, v);
        s = scaled * steps[r * t.row_groups * 2] + s;
      });
    }
    if constexpr (Weights::kHasOffset)
      each([&](VecF& s, int r, int j, int v, const float*) {
        s = weights.offset(j, v) * steps[r * t.row_groups * 2 + 1] + s;
      });
  }
  each([&](VecF& s, int, int j, int v, float* c) {
    store(c, t.bias ? s + load(t.bias + j * kPanelWidth + v * kLanes) : s);
  });
}

// The last panel, of fewer than 16 columns: the same tile on a copy.
template <int R, class Weights>
void multiply_last(const IntegerTile& t, int64_t columns, Weights weights) {
  float copy[R][kPanelWidth] = {};
  float bias[kPanelWidth] = {};
  const size_t bytes = columns * sizeof(float);
  if (t.resumes)
    for (int r = 0; r < R; ++r) std::memcpy(copy[r], t.c + r * t.c_stride, bytes);
  if (t.bias) std::memcpy(bias, t.bias, bytes);
  IntegerTile edge = t;
  edge.bias = t.bias ? bias : nullptr;
  edge.c = copy[0];
  edge.c_stride = kPanelWidth;
  multiply_groups<R, 1>(edge, weights);
  for (int r = 0; r < R; ++r) std::memcpy(t.c + r * t.c_stride, copy[r], bytes);
}

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
