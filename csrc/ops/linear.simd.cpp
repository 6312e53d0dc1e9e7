// A tile of R rows × P panels is kept in registers while k runs; the weights are the stream, the rows of x
// stay in cache. R and P are chosen together, so that every batch size has enough independent chains to hide
// the latency of the multiply-add and few enough to leave registers for the operands:
//
//   x [T, K]          weight panels p, p + 1, … [K, 16] each
//   ┌────────────┐    ┌──┬──┐
//   │ R rows   ──┼─►  │  │  │ k       acc[R][P] += x[r, k] * panel[k, 0:16]
//   └────────────┘    └──┴──┘
//
// A work item is a group of panels that fits in L2 × a block of rows: the weights come from memory once for
// all rows of a block. Depth is cut so that a tile's rows stay in L1; a tile stores its sums and takes them
// up again, which float32 memory does exactly, so the chain over k is never broken.
#include "ops/linear.h"
#include "core/simd.h"
#include "core/threads.h"

namespace bequest::BEQUEST_ISA {
namespace {

constexpr int kVecs = kPanelWidth / kLanes;  // vectors per row of a panel

// What the register file allows: accumulators of a tile in vectors, and the widest tiles.
#if defined(BEQUEST_ISA_avx512)
constexpr int kAccumulators = 24;
constexpr int kTileRows = 12;
constexpr int kTilePanels = 8;
#elif defined(BEQUEST_ISA_avx2)
constexpr int kAccumulators = 12;
constexpr int kTileRows = 6;
constexpr int kTilePanels = 6;
#else
constexpr int kAccumulators = 20;  // GCC loads all operands of a step first, and 24 would leave them no room
constexpr int kTileRows = 5;
constexpr int kTilePanels = 4;
#endif

constexpr int64_t kBlockTiles = 16;          // tiles of rows per work item
constexpr int64_t kDepth = 512;              // values of k per pass
constexpr int64_t kGroupBytes = 768 * 1024;  // weights per work item: part of L2

constexpr int tile_panels(int rows) {
  const int fit = kAccumulators / (rows * kVecs);
  return fit > kTilePanels ? kTilePanels : fit < 1 ? 1 : fit;
}

// How a panel of weights is read: the door for other storage formats.
template <class T>
struct PlainPanel {
  const T* weights;  // [K, 16]
  int64_t depth;     // K

  PlainPanel next(int64_t count) const { return {weights + count * depth * kPanelWidth, depth}; }
  VecF row(int64_t k, int vec) const { return load(weights + k * kPanelWidth + vec * kLanes); }
};

struct Span {
  int64_t begin, end;
};

// Part `index` of [0, count) cut into `parts` that differ by one at most.
Span part_of(int64_t count, int64_t parts, int64_t index) {
  return {count * index / parts, count * (index + 1) / parts};
}

// c [R, 16 P] (+)= x [R, k] · panelsᵀ, the bias added after the last k.
template <int R, int P, class Panel>
void multiply_tile(const float* x, int64_t x_stride, Panel panel, Span k, const float* bias, float* c,
                   int64_t c_stride) {
  VecF acc[R][P][kVecs];
  const auto each = [&](auto f) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int j = 0; j < P; ++j)
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) f(acc[r][j][v], r, j, v);
  };
  if (k.begin == 0) {
    each([](VecF& sum, int, int, int) { sum = VecF{}; });
  } else {
    each(
        [&](VecF& sum, int r, int j, int v) { sum = load(c + r * c_stride + j * kPanelWidth + v * kLanes); });
  }
  Panel panels[P];
#pragma GCC unroll 8
  for (int j = 0; j < P; ++j) panels[j] = panel.next(j);
  for (int64_t i = k.begin; i < k.end; ++i) {
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
  if (bias && k.end == panel.depth) {
    each([&](VecF& sum, int, int j, int v) { sum += load(bias + j * kPanelWidth + v * kLanes); });
  }
  each([&](VecF& sum, int r, int j, int v) { store(c + r * c_stride + j * kPanelWidth + v * kLanes, sum); });
}

// The last panel, of fewer than 16 columns: the same tile on a copy.
template <int R, class Panel>
void multiply_edge(const float* x, int64_t x_stride, Panel panel, Span k, const float* bias, float* c,
                   int64_t c_stride, int64_t columns) {
  float copy[R][kPanelWidth] = {};
  float bias_copy[kPanelWidth] = {};
  const size_t bytes = columns * sizeof(float);
  if (k.begin > 0)
    for (int r = 0; r < R; ++r) std::memcpy(copy[r], c + r * c_stride, bytes);
  if (bias) std::memcpy(bias_copy, bias, bytes);
  multiply_tile<R, 1>(x, x_stride, panel, k, bias ? bias_copy : nullptr, copy[0], kPanelWidth);
  for (int r = 0; r < R; ++r) std::memcpy(c + r * c_stride, copy[r], bytes);
}

// R rows × `panels`, P panels at a time.
template <int R, int P, class Panel>
void multiply_rows(const LinearParams& p, int64_t row, Span panels, Span k) {
  const int64_t whole = p.out_features / kPanelWidth;
  const int64_t last = panels.end < whole ? panels.end : whole;
  const float* x = p.x + row * p.in_features;
  const Panel weight{static_cast<decltype(Panel::weights)>(p.weight), p.in_features};
  int64_t j = panels.begin;
  const auto bias = [&] { return p.bias ? p.bias + j * kPanelWidth : nullptr; };
  const auto out = [&] { return p.out + row * p.out_features + j * kPanelWidth; };
  for (; j + P <= last; j += P)
    multiply_tile<R, P>(x, p.in_features, weight.next(j), k, bias(), out(), p.out_features);
  if constexpr (P > 1) {
    if (j < panels.end) multiply_rows<R, P / 2, Panel>(p, row, {j, panels.end}, k);
  } else if (j < panels.end) {
    const int64_t columns = p.out_features - j * kPanelWidth;
    multiply_edge<R>(x, p.in_features, weight.next(j), k, bias(), out(), p.out_features, columns);
  }
}

// `rows` is at most R; finds the tile made for it.
template <class Panel, int R = kTileRows>
void multiply(const LinearParams& p, Span rows, Span panels, Span k) {
  if constexpr (R > 1) {
    if (rows.end - rows.begin < R) return multiply<Panel, R - 1>(p, rows, panels, k);
  }
  multiply_rows<R, tile_panels(R), Panel>(p, rows.begin, panels, k);
}

template <class Panel>
void multiply_item(const LinearParams& p, Span tiles, int64_t num_tiles, Span panels) {
  const int64_t depth = p.num_tokens == 1 ? p.in_features : kDepth;
  for (int64_t k = 0; k < p.in_features; k += depth) {
    const Span pass{k, k + depth < p.in_features ? k + depth : p.in_features};
    for (int64_t tile = tiles.begin; tile < tiles.end; ++tile)
      multiply<Panel>(p, part_of(p.num_tokens, num_tiles, tile), panels, pass);
  }
}

template <class T>
void run(const LinearParams& p) {
  const int64_t panels = num_panels(p.out_features);
  const int64_t tiles = (p.num_tokens + kTileRows - 1) / kTileRows;
  const int64_t blocks = (tiles + kBlockTiles - 1) / kBlockTiles;
  const int64_t panel_bytes = p.in_features * kPanelWidth * sizeof(T);
  const int64_t fit = kGroupBytes / panel_bytes;
  const int64_t fair = panels * blocks / (num_threads() * 4);  // leaves items for the thread that comes late
  int64_t group = fit < fair ? fit : fair;
  group = group < kTilePanels ? kTilePanels : group / kTilePanels * kTilePanels;
  const int64_t groups = (panels + group - 1) / group;
  parallel_for(groups * blocks, 1, [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; ++item) {
      const int64_t begin = item / blocks * group;
      const Span span{begin, begin + group < panels ? begin + group : panels};
      multiply_item<PlainPanel<T>>(p, part_of(tiles, blocks, item % blocks), tiles, span);
    }
  });
}

}  // namespace

void linear(const LinearParams& p) {
  if (p.num_tokens == 0) return;
  dispatch(p.weight_dtype, [&]<class T>() { run<T>(p); });
}

}  // namespace bequest::BEQUEST_ISA
