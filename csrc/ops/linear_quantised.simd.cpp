// Few rows read codes and make weights of them in registers. For many rows a strip of panels is made float32
// once, in L2, and all tiles of rows pass over it.
#include "ops/linear_quantised.h"

#include "ops/linear_tiles.h"
#include "ops/quantised.h"

namespace bequest::BEQUEST_ISA {
namespace {

constexpr int64_t kBlockRows = 256;  // that pass over a strip

// The part of the weights that is float32 at a time: in L1 where few tiles of rows pass over it, else as much
// as L2 holds beside the rows.
struct Strip {
  int64_t panels;  // the numbers of panels in wide tiles divide it
  int64_t depth;   // values of k, at most

  explicit Strip(int64_t num_tokens)
      : panels(num_tokens > 64 ? 6 : 3), depth(num_tokens > 64 ? kDepth : 128) {}
};

// Rows that read codes, and panels at once for so many: registers hold their sums, scales, offsets and words.
#if defined(BEQUEST_ISA_avx512)
constexpr int kFewRows = 16;
constexpr int few_panels(int rows) { return rows <= 4 ? 3 : rows <= 8 ? 2 : 1; }
#else
constexpr int kFewRows = kTileRows;
constexpr int few_panels(int) { return 1; }
#endif

// Codes number i of some words, as float.
template <int Bits>
VecF codes(VecU words, int i) {
  if constexpr (Bits == 8) return __builtin_convertvector((VecI)(words << (24 - 8 * i)) >> 24, VecF);
#if defined(BEQUEST_ISA_avx512)
  // A permutation looks at the lowest four bits of an index only.
  const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return (VecF)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)(words >> (4 * i)), table);
#else
  return __builtin_convertvector((VecI)((words >> (4 * i)) & 15u), VecF);
#endif
}

VecU load_words(const uint32_t* p) {
  VecU v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

// A group of a panel with its scales in registers.
template <int Bits>
struct OpenGroup {
  const QuantisedGroup<Bits>* group;
  VecF scale[kVecs], offset[kVecs];
  VecU words[kVecs];

  void open(const QuantisedGroup<Bits>* at) {
    group = at;
    for (int v = 0; v < kVecs; ++v) {
      scale[v] = load_half(at->scales + v * kLanes);
      offset[v] = load_half(at->offsets + v * kLanes);
    }
  }
  void take_words(int w) {
    for (int v = 0; v < kVecs; ++v) words[v] = load_words(group->words[w] + v * kLanes);
  }
  VecF weights(int i, int v) const { return codes<Bits>(words[v], i) * scale[v] + offset[v]; }
};

// acc [R, P] += x [R, k of a word] · open words
template <int R, int P, int Bits>
[[gnu::always_inline]] inline void multiply_words(const float* x, int64_t x_stride,
                                                  const OpenGroup<Bits>* open, VecF (&acc)[R][P][kVecs]) {
  constexpr int kPerWord = QuantisedGroup<Bits>::kPerWord;
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
template <int R, int P, int Bits>
void multiply_codes(const TileOperands& t, const QuantisedGroup<Bits>* panel) {
  using Group = QuantisedGroup<Bits>;
  const int64_t groups = t.depth / kGroup;
  VecF acc[R][P][kVecs] = {};
  for (int64_t g = 0; g < groups; ++g) {
    OpenGroup<Bits> open[P];
#pragma GCC unroll 4
    for (int j = 0; j < P; ++j) {
      const Group* at = panel + j * groups + g;
      open[j].open(at);
      for (size_t line = 0; line < sizeof(Group); line += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(at + P * groups) + line, 0, 2);
    }
    for (int w = 0; w < Group::kWords; ++w) {
#pragma GCC unroll 4
      for (int j = 0; j < P; ++j) open[j].take_words(w);
      multiply_words<R, P>(t.x + g * kGroup + w * Group::kPerWord, t.x_stride, open, acc);
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

// f<R>() for R = rows, which is at most Most.
template <int Most, class F>
void with_rows(int64_t rows, F f) {
  if constexpr (Most > 1) {
    if (rows < Most) return with_rows<Most - 1>(rows, f);
  }
  f.template operator()<Most>();
}

TileOperands operands(const LinearParams& p, int64_t row, int64_t panel, Span k) {
  return {.x = p.x + row * p.in_features + k.begin,
          .x_stride = p.in_features,
          .depth = k.end - k.begin,
          .resumes = k.begin > 0,
          .bias = p.bias && k.end == p.in_features ? p.bias + panel * kPanelWidth : nullptr,
          .c = p.out + row * p.out_features + panel * kPanelWidth,
          .c_stride = p.out_features};
}

// Panels [j, end) in blocks of P, the last ones fewer; f<P>(j, whole): whether all columns are there.
template <int P, class F>
void each_block(const LinearParams& p, int64_t j, int64_t end, F f) {
  for (; j + P <= end; j += P) {
    if ((j + P) * kPanelWidth > p.out_features) break;
    f.template operator()<P>(j, true);
  }
  if constexpr (P > 1) {
    if (j < end) each_block<P - 1>(p, j, end, f);
  } else if (j < end) {
    f.template operator()<1>(j, false);
  }
}

template <int Bits>
void multiply_few(const LinearParams& p, const QuantisedItem& item) {
  const auto* groups = static_cast<const QuantisedGroup<Bits>*>(p.weight);
  const int64_t per_panel = p.in_features / kGroup;
  with_rows<kFewRows>(item.row_end - item.row_begin, [&]<int R>() {
    each_block<few_panels(R)>(p, item.panel_begin, item.panel_end, [&]<int P>(int64_t j, bool whole) {
      const TileOperands t = operands(p, item.row_begin, j, {0, p.in_features});
      const auto multiply = [&](const TileOperands& at) {
        multiply_codes<R, P, Bits>(at, groups + j * per_panel);
      };
      whole ? multiply(t) : multiply_edge<R>(t, p.out_features - j * kPanelWidth, multiply);
    });
  });
}

// to [depth, 16] = weights of a panel
template <int Bits>
void expand(const QuantisedGroup<Bits>* groups, int64_t count, float* to) {
  using Group = QuantisedGroup<Bits>;
  for (int64_t g = 0; g < count; ++g) {
    OpenGroup<Bits> open;
    open.open(groups + g);
    for (int w = 0; w < Group::kWords; ++w) {
      open.take_words(w);
#pragma GCC unroll 8
      for (int i = 0; i < Group::kPerWord; ++i, to += kPanelWidth)
        for (int v = 0; v < kVecs; ++v) store(to + v * kLanes, open.weights(i, v));
    }
  }
}

// All tiles of rows over panels [begin, end), whose weights are `strip`.
void multiply_strip(const LinearParams& p, const QuantisedItem& item, int64_t begin, int64_t end, Span k,
                    const float* strip) {
  const PlainPanel<float> weight{strip, (k.end - k.begin) * kPanelWidth};
  const int64_t rows = item.row_end - item.row_begin;
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const Span span = part_of(rows, tiles, tile);
    with_rows<kTileRows>(span.end - span.begin, [&]<int R>() {
      each_block<tile_panels(R)>(p, begin, end, [&]<int P>(int64_t j, bool whole) {
        const TileOperands t = operands(p, item.row_begin + span.begin, j, k);
        const auto panel = weight.next(j - begin);
        const auto multiply = [&](const TileOperands& at) {
          multiply_tile<R, P>(at, panel, {panel.address(), 0});
        };
        whole ? multiply(t) : multiply_edge<R>(t, p.out_features - j * kPanelWidth, multiply);
      });
    });
  }
}

template <int Bits>
void multiply_many(const LinearParams& p, const QuantisedItem& item, float* scratch) {
  const auto* groups = static_cast<const QuantisedGroup<Bits>*>(p.weight);
  const int64_t per_panel = p.in_features / kGroup;
  const Strip strip(p.num_tokens);
  const int64_t passes = (p.in_features + strip.depth - 1) / strip.depth;
  for (int64_t begin = item.panel_begin; begin < item.panel_end; begin += strip.panels) {
    const int64_t end = begin + strip.panels < item.panel_end ? begin + strip.panels : item.panel_end;
    for (int64_t i = 0; i < passes; ++i) {
      const Span g = part_of(per_panel, passes, i);
      const Span k{g.begin * kGroup, g.end * kGroup};
      for (int64_t j = begin; j < end; ++j)
        expand<Bits>(groups + j * per_panel + g.begin, g.end - g.begin,
                     scratch + (j - begin) * (k.end - k.begin) * kPanelWidth);
      multiply_strip(p, item, begin, end, k, scratch);
    }
  }
}

}  // namespace

QuantisedCut quantised_cut(const LinearParams& p) {
  if (p.num_tokens <= kFewRows)
    return {.rows = kFewRows, .panels = few_panels(static_cast<int>(p.num_tokens)), .scratch_bytes = 0};
  const Strip strip(p.num_tokens);
  return {.rows = kBlockRows,
          .panels = strip.panels,
          // A pass is a whole number of groups and may be one longer than the depth.
          .scratch_bytes = strip.panels * (strip.depth + kGroup) * kPanelWidth * int64_t{sizeof(float)}};
}

void multiply_quantised(const LinearParams& p, const QuantisedItem& item, float* scratch) {
  const bool few = p.num_tokens <= kFewRows;
  if (p.format == WeightFormat::kQ4) {
    few ? multiply_few<4>(p, item) : multiply_many<4>(p, item, scratch);
  } else {
    few ? multiply_few<8>(p, item) : multiply_many<8>(p, item, scratch);
  }
}

}  // namespace bequest::BEQUEST_ISA
