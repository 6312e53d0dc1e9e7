// The register tile of products of integers, for *.dot.cpp files: R rows × P panels, group by group of k. A
// group's products are added as integers, and groups as floats.
#pragma once

#include "core/dot_products.h"
#include "ops/cpu/linear_tiles.h"
#include "ops/cpu/quantised_operands.h"

namespace bequest::BEQUEST_ISA {
namespace {

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

// Vectors of float sums that registers hold beside those of integers.
#if defined(BEQUEST_DOT_dotprod)
constexpr int kMostSums = 8;
#else
constexpr int kMostSums = 32;
#endif

// f(r, j, v) for every vector of a tile.
template <int R, int P, class F>
[[gnu::always_inline]] inline void each_vector(F f) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < P; ++j)
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) f(r, j, v);
}

#if defined(BEQUEST_DOT_dotprod)

// f<0>() … f<N - 1>()
template <int N, class F>
[[gnu::always_inline]] inline void each_word(F f) {
  if constexpr (N > 0) {
    each_word<N - 1>(f);
    f.template operator()<N - 1>();
  }
}

constexpr int kWordsAtOnce = 4;  // of x, in a vector

// dots = Σ of operands [first, first + Count) · x, rows of x `x_stride` apart. Both digits of x at once, as
// operands are made of codes on their way.
template <int R, int P, int Count, class Weights>
[[gnu::always_inline]] inline void multiply_operands(const Weights& weights, int first, const uint32_t* x,
                                                     int64_t x_stride, VecI (&dots)[R][P][kVecs]) {
  VecI high[R][P][kVecs] = {};
  each_vector<R, P>([&](int r, int j, int v) { dots[r][j][v] = VecI{}; });
#pragma GCC unroll 2
  for (int o = first; o < first + Count; o += kWordsAtOnce) {
    VecU upper[R], lower[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      upper[r] = load_words(x + r * x_stride + o);
      lower[r] = load_words(x + r * x_stride + kGroupOperands + o);
    }
    each_word<kWordsAtOnce>([&]<int Word>() {
#pragma GCC unroll 8
      for (int j = 0; j < P; ++j)
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
          const VecU codes = weights.operand(j, o + Word, v);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            high[r][j][v] = add_quads<Word>(high[r][j][v], codes, upper[r]);
            dots[r][j][v] = add_quads<Word>(dots[r][j][v], codes, lower[r]);
          }
        }
    });
  }
  each_vector<R, P>([&](int r, int j, int v) { dots[r][j][v] += high[r][j][v] << 8; });
}

// The same of operands that lie in memory, which are read twice: the low digits are added to the high ones,
// so that there is one sum to keep, and to add up.
template <int R, int P, int Count, class Codes>
[[gnu::always_inline]] inline void multiply_operands(const OperandPanels<Codes>& weights, int first,
                                                     const uint32_t* x, int64_t x_stride,
                                                     VecI (&dots)[R][P][kVecs]) {
  each_vector<R, P>([&](int r, int j, int v) { dots[r][j][v] = VecI{}; });
#pragma GCC unroll 2
  for (int digit = 0; digit < 2; ++digit) {
    if (digit > 0) {
      asm volatile("" ::: "memory");  // else GCC would keep all operands, on the stack
      each_vector<R, P>([&](int r, int j, int v) { dots[r][j][v] <<= 8; });
    }
#pragma GCC unroll 2
    for (int o = first; o < first + Count; o += kWordsAtOnce) {
      VecU words[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) words[r] = load_words(x + r * x_stride + digit * kGroupOperands + o);
      each_word<kWordsAtOnce>([&]<int Word>() {
#pragma GCC unroll 8
        for (int j = 0; j < P; ++j)
#pragma GCC unroll 4
          for (int v = 0; v < kVecs; ++v) {
            const VecU codes = weights.operand(j, o + Word, v);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) dots[r][j][v] = add_quads<Word>(dots[r][j][v], codes, words[r]);
          }
      });
    }
  }
}

#else

// dots = Σ of operands [first, first + Count) · x, rows of x `x_stride` apart.
template <int R, int P, int Count, class Weights>
[[gnu::always_inline]] inline void multiply_operands(const Weights& weights, int first, const uint32_t* x,
                                                     int64_t x_stride, VecI (&dots)[R][P][kVecs]) {
  each_vector<R, P>([&](int r, int j, int v) { dots[r][j][v] = VecI{}; });
#pragma GCC unroll 16
  for (int o = first; o < first + Count; ++o) {
    VecU operand[P][kVecs];
#pragma GCC unroll 8
    for (int j = 0; j < P; ++j)
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) operand[j][v] = weights.operand(j, o, v);
    each_vector<R, P>([&](int r, int j, int v) {
      dots[r][j][v] = add_pairs(dots[r][j][v], operand[j][v], x + r * x_stride + o);
    });
  }
}

#endif

// The float sums of a tile: in registers, or, where integers need these, where they go in the end.
template <int R, int P, bool InRegisters>
struct TileSums {
  VecF kept[R][P][kVecs];

  void take(int r, int j, int v, const float* c) { kept[r][j][v] = load(c); }
  void clear(int r, int j, int v, float*) { kept[r][j][v] = VecF{}; }
  VecF get(int r, int j, int v, const float*) const { return kept[r][j][v]; }
  void set(int r, int j, int v, float*, VecF sum) { kept[r][j][v] = sum; }
};
template <int R, int P>
struct TileSums<R, P, false> {
  void take(int, int, int, const float*) {}
  void clear(int, int, int, float* c) { store(c, VecF{}); }
  VecF get(int, int, int, const float* c) const { return load(c); }
  void set(int, int, int, float* c, VecF sum) { store(c, sum); }
};

// c [R, 16 P] = x · weightsᵀ, where `weights` shows a group of P panels at a time.
template <int R, int P, class Weights>
void multiply_groups(const IntegerTile& t, Weights weights) {
  constexpr int kScales = Weights::kScales, kOperands = kGroupOperands / kScales;
  TileSums<R, P, (R * P * kVecs <= kMostSums)> sums;
  const int64_t x_stride = t.row_groups * kBlockWords, step_stride = t.row_groups * 2, c_stride = t.c_stride;
  float* const c = t.c;
  const auto at = [=](int r, int j, int v) { return c + r * c_stride + j * kPanelWidth + v * kLanes; };
  each_vector<R, P>([&](int r, int j, int v) {
    t.resumes ? sums.take(r, j, v, at(r, j, v)) : sums.clear(r, j, v, at(r, j, v));
  });
  const uint32_t* x = t.x;
  const float* steps = t.steps;
  for (int64_t g = 0, groups = t.groups; g < groups; ++g, x += kBlockWords, steps += 2) {
    weights.open(g);
    float step[R], offset_step[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      step[r] = steps[r * step_stride];
      offset_step[r] = steps[r * step_stride + 1];
    }
#pragma GCC unroll 2
    for (int part = 0; part < kScales; ++part) {
      VecI dots[R][P][kVecs];
      multiply_operands<R, P, kOperands>(weights, part * kOperands, x, x_stride, dots);
#pragma GCC unroll 8
      for (int j = 0; j < P; ++j)
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
          const VecF scale = weights.scale(j, part, v);
          VecF offset = {};
          if (Weights::kHasOffset && part + 1 == kScales) offset = weights.offset(j, v);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const VecF scaled = __builtin_convertvector(dots[r][j][v], VecF) * scale;
            VecF sum = scaled * step[r] + sums.get(r, j, v, at(r, j, v));
            if (Weights::kHasOffset && part + 1 == kScales) sum = offset * offset_step[r] + sum;
            sums.set(r, j, v, at(r, j, v), sum);
          }
        }
    }
  }
  each_vector<R, P>([&](int r, int j, int v) {
    const VecF sum = sums.get(r, j, v, at(r, j, v));
    store(at(r, j, v), t.bias ? sum + load(t.bias + j * kPanelWidth + v * kLanes) : sum);
  });
}

// The last panel, of fewer than 16 columns.
template <int R, class Weights>
void multiply_last(const IntegerTile& t, int64_t columns, Weights weights) {
  multiply_edge<R>(t, columns, [&](const IntegerTile& edge) { multiply_groups<R, 1>(edge, weights); });
}

}  // namespace
}  // namespace bequest::BEQUEST_ISA
