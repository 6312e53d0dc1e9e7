// Few rows read codes and make weights of them in registers. For many rows a strip of panels is made float32
// once, in L2, and all tiles of rows pass over it.
#include "ops/cpu/linear_quantised.h"

#include "ops/cpu/linear_tiles.h"
#include "ops/cpu/quantised_codes.h"
#include "ops/cpu/quantised_columns.h"

namespace bequest::BEQUEST_ISA {
namespace {

constexpr int64_t kBlockRows = 256;  // that pass over a strip

// The part of the weights that is float32 at a time: in L1 where few tiles of rows pass over it, else as much
// as L2 holds beside the rows.
struct Strip {
  int64_t panels;  // the numbers of panels in wide tiles divide it
  int64_t depth;   // values of k, at most

  explicit Strip(const LinearParams& p)
      : panels(p.num_tokens > 64 || p.gated() ? 6 : 3), depth(p.num_tokens > 64 ? kDepth : 128) {}

  // A pass is a whole number of groups and may be one longer than the depth.
  int64_t floats() const { return panels * (depth + kGroup) * kPanelWidth; }
};

// Rows that read codes, and panels at once for so many: registers hold their sums, scales, offsets and words.
#if defined(BEQUEST_ISA_avx512)
constexpr int kFewRows = 16;
constexpr int few_panels(int rows) { return rows <= 4 ? 3 : rows <= 8 ? 2 : 1; }
#else
constexpr int kFewRows = kTileRows;
constexpr int few_panels(int) { return 1; }
#endif

// Codes number i of word w of a group, as float.
template <class Codes>
VecF code_values(VecU words, const VecU* high, int w, int i) {
  if constexpr (Codes::kBits == 8) return __builtin_convertvector((VecI)(words << (24 - 8 * i)) >> 24, VecF);
  if constexpr (Codes::kHighBits > 0) {
    const HighPlace place = high_place(Codes::kHighBits, 8 * w + i);
    const VecU upper = high[place.word] >> place.shift & ((1u << Codes::kHighBits) - 1);
    return __builtin_convertvector((VecI)((words >> (4 * i) & 15u) | upper << 4), VecF);
  }
#if defined(BEQUEST_ISA_avx512)
  // A permutation looks at the lowest four bits of an index only.
  const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return (VecF)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)(words >> (4 * i)), table);
#else
  return __builtin_convertvector((VecI)((words >> (4 * i)) & 15u), VecF);
#endif
}

// A group of a panel with its scales in registers.
template <class Codes>
struct OpenGroup {
  const typename Codes::Block* block;
  int group, word;
  VecF scale[kVecs], offset[kVecs];
  VecU words[kVecs], high[kVecs][Codes::kHighBits == 0 ? 1 : Codes::kHighBits];

  void open(const typename Codes::Block* at, int number) {
    block = at;
    group = number;
    for (int v = 0; v < kVecs; ++v) {
      if constexpr (Codes::kScales == 1) {
        scale[v] = Codes::scale(*at, number, 0, v);
        offset[v] = Codes::offset(*at, number, v);
      }
      for (int i = 0; i < Codes::kHighBits; ++i)
        high[v][i] = load_words(Codes::high(*at, number, i) + v * kLanes);
    }
  }
  void take_words(int w) {
    word = w;
    for (int v = 0; v < kVecs; ++v) {
      words[v] = load_words(Codes::words(*block, group, w) + v * kLanes);
      if constexpr (Codes::kScales > 1) {
        scale[v] = Codes::scale(*block, group, w / (Codes::kWords / Codes::kScales), v);
        offset[v] = scale[v] * static_cast<float>(Codes::kLeast);
      }
    }
  }
  VecF weights(int i, int v) const {
    return code_values<Codes>(words[v], high[v], word, i) * scale[v] + offset[v];
  }
};

// acc [R, P] += x [R, k of a word] · open words
template <int R, int P, class Codes>
[[gnu::always_inline]] inline void multiply_words(const float* x, int64_t x_stride,
                                                  const OpenGroup<Codes>* open, VecF (&acc)[R][P][kVecs]) {
  constexpr int kPerWord = Codes::kWordCodes;
  // More rows than pointers to rows fit registers: so many k are made weights that each pointer is loaded
  // once.
  constexpr int kAtOnce = R > kTileRows ? kPerWord : 1;
#pragma GCC unroll 8
  for (int first = 0; first < kPerWord; first += kAtOnce) {
    VecF b[kAtOnce][P][kVecs];
#pragma GCC unroll 8
    for (int i = 0; i < kAtOnce; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < P; ++j)
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) b[i][j][v] = open[j].weights(first + i, v);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int i = 0; i < kAtOnce; ++i) {
        const VecF a = broadcast(x[r * x_stride + first + i]);
#pragma GCC unroll 4
        for (int j = 0; j < P; ++j)
#pragma GCC unroll 4
          for (int v = 0; v < kVecs; ++v) acc[r][j][v] = a * b[i][j][v] + acc[r][j][v];
      }
  }
}

// c [R, 16 P] = x [R, K] · panelsᵀ, meanwhile asking for the panels after these.
template <int R, int P, class Codes>
void multiply_codes(const TileOperands& t, const typename Codes::Block* panel) {
  const int64_t groups = t.depth / kGroup, blocks = groups / Codes::kBlockGroups;
  VecF acc[R][P][kVecs] = {};
  for (int64_t g = 0; g < groups; ++g) {
    const GroupPlace<Codes> place(g);
    OpenGroup<Codes> open[P];
#pragma GCC unroll 4
    for (int j = 0; j < P; ++j) {
      const auto* at = panel + j * blocks + place.block;
      open[j].open(at, place.group);
      prefetch_group<Codes>(at + P * blocks, place.group);
    }
    for (int w = 0; w < Codes::kWords; ++w) {
#pragma GCC unroll 4
      for (int j = 0; j < P; ++j) open[j].take_words(w);
      multiply_words<R, P>(t.x + g * kGroup + w * Codes::kWordCodes, t.x_stride, open, acc);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < P; ++j)
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        const int column = j * kPanelWidth + v * kLanes;
        if (t.bias) acc[r][j][v] += load(t.bias + column);
        store(t.c + r * t.c_stride + column, acc[r][j][v]);
      }
}

// What is multiplied for panel `j` of some columns, both halves counted.
template <class Columns>
TileOperands operands(const Columns& at, int64_t row, int64_t j, Span k) {
  const LinearParams& p = at.p;
  return {.x = p.x + row * p.x_stride + k.begin,
          .x_stride = p.x_stride,
          .depth = k.end - k.begin,
          .resumes = k.begin > 0,
          .bias = at.bias() && k.end == p.in_features ? at.bias() + j * kPanelWidth : nullptr,
          .c = at.sums(row) + j * kPanelWidth,
          .c_stride = at.stride()};
}

template <class Codes, class Columns>
void multiply_few(const LinearParams& p, const QuantisedItem& item, float* scratch) {
  const auto* blocks = static_cast<const typename Codes::Block*>(p.weight);
  const int64_t per_panel = p.in_features / (kGroup * Codes::kBlockGroups);
  const Span rows{item.row_begin, item.row_end};
  with_rows<few_rows<Codes>(kFewRows)>(rows.end - rows.begin, [&]<int R>() {
    constexpr int kMost = few_panels(R);
    const int64_t step = Columns::kHalves == 2 ? kMost : item.panel_end - item.panel_begin;
    for (int64_t begin = item.panel_begin; begin < item.panel_end; begin += step) {
      const int64_t count = begin + step < item.panel_end ? step : item.panel_end - begin;
      const Columns at(p, begin, count, rows, scratch);
      for (int half = 0; half < Columns::kHalves; ++half) {
        const auto* first = blocks + (at.panel(half) - half * count) * per_panel;
        each_block<kMost>(at.columns(), half * count, (half + 1) * count, [&]<int P>(int64_t j, bool whole) {
          const TileOperands t = operands(at, rows.begin, j, {0, p.in_features});
          const auto multiply = [&](const TileOperands& to) {
            multiply_codes<R, P, Codes>(to, first + j * per_panel);
          };
          whole ? multiply(t) : multiply_edge<R>(t, at.columns() - j * kPanelWidth, multiply);
        });
      }
      at.finish(rows);
    }
  });
}

// to [groups, 32, 16] = weights of a panel
template <class Codes>
void expand(const typename Codes::Block* panel, Span groups, float* to) {
  for (int64_t g = groups.begin; g < groups.end; ++g) {
    const GroupPlace<Codes> place(g);
    OpenGroup<Codes> open;
    open.open(panel + place.block, place.group);
    for (int w = 0; w < Codes::kWords; ++w) {
      open.take_words(w);
#pragma GCC unroll 8
      for (int i = 0; i < Codes::kWordCodes; ++i, to += kPanelWidth)
        for (int v = 0; v < kVecs; ++v) store(to + v * kLanes, open.weights(i, v));
    }
  }
}

// All tiles of rows over some columns, whose weights are `strip`.
template <class Columns>
void multiply_strip(const Columns& at, const QuantisedItem& item, Span k, const float* strip) {
  const PlainPanel<float> weight{strip, (k.end - k.begin) * kPanelWidth};
  const int64_t rows = item.row_end - item.row_begin;
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const Span span = part_of(rows, tiles, tile);
    const int64_t row = item.row_begin + span.begin;
    with_rows<kTileRows>(span.end - span.begin, [&]<int R>() {
      each_block<tile_panels(R)>(
          at.columns(), 0, Columns::kHalves * at.panels, [&]<int P>(int64_t j, bool whole) {
            const TileOperands t = operands(at, row, j, k);
            const auto panel = weight.next(j);
            const auto multiply = [&](const TileOperands& to) {
              multiply_tile<R, P>(to, panel, {panel.address(), 0});
            };
            whole ? multiply(t) : multiply_edge<R>(t, at.columns() - j * kPanelWidth, multiply);
          });
    });
    if (k.end == at.p.in_features) at.finish({row, item.row_begin + span.end});
  }
}

template <class Codes, class Columns>
void multiply_many(const LinearParams& p, const QuantisedItem& item, float* scratch) {
  const auto* blocks = static_cast<const typename Codes::Block*>(p.weight);
  const int64_t groups = p.in_features / kGroup, per_panel = groups / Codes::kBlockGroups;
  const Strip strip(p);
  const int64_t step = strip.panels / Columns::kHalves;
  const int64_t passes = (p.in_features + strip.depth - 1) / strip.depth;
  for (int64_t begin = item.panel_begin; begin < item.panel_end; begin += step) {
    const int64_t count = begin + step < item.panel_end ? step : item.panel_end - begin;
    const Columns at(p, begin, count, {item.row_begin, item.row_end}, scratch + strip.floats());
    for (int64_t i = 0; i < passes; ++i) {
      const Span g = part_of(groups, passes, i);
      const Span k{g.begin * kGroup, g.end * kGroup};
      float* to = scratch;
      for (int half = 0; half < Columns::kHalves; ++half)
        for (int64_t j = 0; j < count; ++j, to += (k.end - k.begin) * kPanelWidth)
          expand<Codes>(blocks + (at.panel(half) + j) * per_panel, g, to);
      multiply_strip(at, item, k, scratch);
    }
  }
}

template <class Columns>
void multiply_columns(const LinearParams& p, const QuantisedItem& item, float* scratch) {
  with_codes(p.format, [&]<class Codes>() {
    p.num_tokens <= few_rows<Codes>(kFewRows) ? multiply_few<Codes, Columns>(p, item, scratch)
                                              : multiply_many<Codes, Columns>(p, item, scratch);
  });
}

}  // namespace

QuantisedCut quantised_cut(const LinearParams& p) {
  const auto sums = [&](int64_t rows) { return p.gated() ? rows * 2 * kMostGated * kPanelWidth : 0; };
  int64_t few = 0;
  with_codes(p.format, [&]<class Codes>() { few = few_rows<Codes>(kFewRows); });
  if (p.num_tokens <= few)
    return {.rows = few,
            .panels = few_panels(static_cast<int>(p.num_tokens)),
            .scratch_bytes = sums(few) * int64_t{sizeof(float)}};
  const Strip strip(p);
  return {.rows = kBlockRows,
          .panels = p.gated() ? strip.panels / 2 : strip.panels,
          .scratch_bytes = (strip.floats() + sums(kBlockRows)) * int64_t{sizeof(float)}};
}

void multiply_quantised(const LinearParams& p, const QuantisedItem& item, float* scratch) {
  if (!p.gated()) return multiply_columns<PlainColumns>(p, item, scratch);
  with_activation(p.activation, [&]<class F>() { multiply_columns<GatedColumns<F>>(p, item, scratch); });
}

}  // namespace bequest::BEQUEST_ISA
