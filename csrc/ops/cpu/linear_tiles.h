// The register tile of the matrix product, for *.simd.cpp files: R rows × P panels are kept in registers
// while k runs. R and P are chosen together, so that every batch size has enough independent chains to hide
// the latency of the multiply-add and few enough to leave registers for the operands:
//
//   x [T, K]          weight panels p, p + 1, … [K, 16] each
//   ┌────────────┐    ┌──┬──┐
//   │ R rows   ──┼─►  │  │  │ k       acc[R][P] += x[r, k] * panel[k, 0:16]
//   └────────────┘    └──┴──┘
//
// A tile may take a part of k: it stores its sums and takes them up again, which float32 memory does exactly,
// so the chain over k is never broken.
#pragma once

#include "core/simd.h"
#include "ops/cpu/linear.h"

namespace bequest::BEQUEST_ISA {
namespace {

constexpr int kVecs = kPanelWidth / kLanes;  // vectors per row of a panel

// What the register file allows: accumulators of a tile in vectors, and the widest tiles.
#if defined(BEQUEST_ISA_avx512)
constexpr int kAccumulators = 24;
constexpr int kTileRows = 8;  // more would need more row pointers than there are registers
constexpr int kTilePanels = 8;
#elif defined(BEQUEST_ISA_avx2)
constexpr int kAccumulators = 12;
constexpr int kTileRows = 6;
constexpr int kTilePanels = 6;
#else
constexpr int kAccumulators = 20;  // GCC loads all operands of a step first, and 24 would leave them no room
constexpr int kTileRows = 5;
constexpr int kTilePanels = 2;
#endif

// Panels that rows which wait for memory read at once. Prefetchers of x86-64 follow many streams; those of a
// Neoverse N1 read one of float32 1.4 times as fast as four, and two where a stream is half as wide.
template <int64_t RowBytes>
constexpr int streamed_panels() {
#if defined(BEQUEST_ISA_neon)
  return RowBytes < 64 ? 2 : 1;
#else
  return kTilePanels;
#endif
}

constexpr int64_t kDepth = 640;   // values of k per pass, at most: a tile's rows stay in L1
constexpr int kStreamedRows = 3;  // up to here a tile relies on the hardware's prefetchers

constexpr int tile_panels(int rows) {
  const int fit = kAccumulators / (rows * kVecs);
  return fit > kTilePanels ? kTilePanels : fit < 1 ? 1 : fit;
}

struct Span {
  int64_t begin, end;
};

// Part `index` of [0, count) cut into `parts` that differ by one at most.
inline Span part_of(int64_t count, int64_t parts, int64_t index) {
  return {count * index / parts, count * (index + 1) / parts};
}

// Panels of weights from some k on, as a tile reads them.
template <class T>
struct PlainPanel {
  static constexpr int64_t kRowBytes = kPanelWidth * sizeof(T);

  const T* weights;  // [k, 16]
  int64_t stride;    // weights from one panel to the next

  PlainPanel next(int64_t count) const { return {weights + count * stride, stride}; }
  PlainPanel from(int64_t k) const { return {weights + k * kPanelWidth, stride}; }
  VecF row(int64_t k, int vec) const {
#if defined(BEQUEST_ISA_neon)
    if constexpr (sizeof(T) == 2)
      return load_of_two(weights + k * kPanelWidth + vec / 2 * 2 * kLanes, vec % 2);
#endif
    return load(weights + k * kPanelWidth + vec * kLanes);
  }
  const char* address() const { return reinterpret_cast<const char*>(weights); }
};

// Weights that a tile brings into L2 while it computes: `step` bytes per k of each of its panels' successors.
struct Ahead {
  const char* line;
  int64_t step;  // 0: there is nothing to bring
};

// What a tile multiplies, and where its sums go.
struct TileOperands {
  const float* x;  // [R, k], rows x_stride apart
  int64_t x_stride;
  int64_t depth;      // values of k
  bool resumes;       // starts from the sums in c
  const float* bias;  // [16 P], with the last k; or null
  float* c;           // [R, 16 P], rows c_stride apart
  int64_t c_stride;
};

template <int R, int P, class Panel>
void multiply_tile(const TileOperands& t, Panel panel, Ahead ahead) {
  VecF acc[R][P][kVecs];
  const auto each = [&](auto f) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int j = 0; j < P; ++j)
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) f(acc[r][j][v], r, j, v);
  };
  float* const c = t.c;
  const int64_t c_stride = t.c_stride;
  if (t.resumes) {
    each(
        [&](VecF& sum, int r, int j, int v) { sum = load(c + r * c_stride + j * kPanelWidth + v * kLanes); });
  } else {
    each([](VecF& sum, int, int, int) { sum = VecF{}; });
  }
  Panel panels[P];
#pragma GCC unroll 8
  for (int j = 0; j < P; ++j) panels[j] = panel.next(j);
  const int64_t panel_bytes = panel.next(1).address() - panel.address();
  const float* const x = t.x;
  const int64_t x_stride = t.x_stride;
  for (int64_t i = 0; i < t.depth; ++i) {
    if constexpr (R > kStreamedRows) {
#pragma GCC unroll 8
      for (int j = 0; j < P; ++j) __builtin_prefetch(ahead.line + j * panel_bytes, 0, 2);
      ahead.line += ahead.step;
    }
    // The shorter side is held in registers, the longer one passes through.
    if constexpr (R < P * kVecs) {
      VecF a[R];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) a[r] = broadcast(x[r * x_stride + i]);
#pragma GCC unroll 8
      for (int j = 0; j < P; ++j)
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
          const VecF b = panels[j].row(i, v);
#pragma GCC unroll 16
          for (int r = 0; r < R; ++r) acc[r][j][v] = a[r] * b + acc[r][j][v];
        }
    } else {
      VecF b[P][kVecs];
#pragma GCC unroll 8
      for (int j = 0; j < P; ++j)
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) b[j][v] = panels[j].row(i, v);
      each([&](VecF& sum, int r, int j, int v) { sum = broadcast(x[r * x_stride + i]) * b[j][v] + sum; });
    }
  }
  if (t.bias) {
    each([&](VecF& sum, int, int j, int v) { sum += load(t.bias + j * kPanelWidth + v * kLanes); });
  }
  each([&](VecF& sum, int r, int j, int v) { store(c + r * c_stride + j * kPanelWidth + v * kLanes, sum); });
}

// The last panel, of fewer than 16 columns: the same tile on a copy. f(operands) multiplies it.
template <int R, class Operands, class F>
void multiply_edge(const Operands& t, int64_t columns, F f) {
  float copy[R][kPanelWidth] = {};
  float bias_copy[kPanelWidth] = {};
  const size_t bytes = columns * sizeof(float);
  if (t.resumes)
    for (int r = 0; r < R; ++r) std::memcpy(copy[r], t.c + r * t.c_stride, bytes);
  if (t.bias) std::memcpy(bias_copy, t.bias, bytes);
  Operands edge = t;
  edge.bias = t.bias ? bias_copy : nullptr;
  edge.c = copy[0];
  edge.c_stride = kPanelWidth;
  f(edge);
  for (int r = 0; r < R; ++r) std::memcpy(t.c + r * t.c_stride, copy[r], bytes);
}

}  // namespace
}  // namespace bequest::BEQUEST_ISA
