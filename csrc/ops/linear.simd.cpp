// A tile of R rows × P panels is kept in registers while k runs; the weights are the stream, the rows of x
// stay in cache. R and P are chosen together, so that every batch size has enough independent chains to hide
// the latency of the multiply-add and few enough to leave registers for the operands:
//
//   x [T, K]          weight panels p, p + 1, … [K, 16] each
//   ┌────────────┐    ┌──┬──┐
//   │ R rows   ──┼─►  │  │  │ k       acc[R][P] += x[r, k] * panel[k, 0:16]
//   └────────────┘    └──┴──┘
//
// A work item is a group of panels × a block of rows. It goes over its panels in strips, each small enough to
// stay in L2 while all tiles of rows pass over it, and depth is cut so that a tile's rows stay in L1. A tile
// stores its sums and takes them up again, which float32 memory does exactly, so the chain over k is never
// broken.
//
// With few rows the time goes into reading weights. One to three rows stream eight panels at once, which
// keeps the hardware's prefetchers busy; wider tiles read fewer streams and would wait for memory in every
// page, so all tiles of a strip together prefetch the next strip, each its share, evenly spread over its
// multiply-adds.
#include "ops/linear.h"

#include "core/simd.h"
#include "core/threads.h"

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
constexpr int kTilePanels = 4;
#endif

constexpr int64_t kBlockTiles = 16;  // tiles of rows per work item
constexpr int64_t kDepth = 640;      // values of k per pass, at most
constexpr int64_t kStrip = 12;       // panels per strip; most numbers of panels in a tile divide it
constexpr int kStreamedRows = 3;     // up to here a tile relies on the hardware's prefetchers

constexpr int tile_panels(int rows) {
  const int fit = kAccumulators / (rows * kVecs);
  return fit > kTilePanels ? kTilePanels : fit < 1 ? 1 : fit;
}

// How a panel of weights is read: the door for other storage formats.
template <class T>
struct PlainPanel {
  static constexpr int64_t kRowBytes = kPanelWidth * sizeof(T);

  const T* weights;  // [K, 16]
  int64_t depth;     // K

  PlainPanel next(int64_t count) const { return {weights + count * depth * kPanelWidth, depth}; }
  VecF row(int64_t k, int vec) const { return load(weights + k * kPanelWidth + vec * kLanes); }
  const char* address(int64_t k) const { return reinterpret_cast<const char*>(weights + k * kPanelWidth); }
};

struct Span {
  int64_t begin, end;
};

// Part `index` of [0, count) cut into `parts` that differ by one at most.
Span part_of(int64_t count, int64_t parts, int64_t index) {
  return {count * index / parts, count * (index + 1) / parts};
}

// Weights that a tile brings into L2 while it computes: `step` bytes per k of each of its panels' successors.
struct Ahead {
  const char* line;
  int64_t step;
};

// c [R, 16 P] (+)= x [R, k] · panelsᵀ, the bias added after the last k.
template <int R, int P, class Panel>
void multiply_tile(const float* x, int64_t x_stride, Panel panel, Span k, Ahead ahead, const float* bias,
                   float* c, int64_t c_stride) {
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
  const int64_t panel_bytes = panel.depth * Panel::kRowBytes;
  for (int64_t i = k.begin; i < k.end; ++i) {
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
  const Ahead nothing{panel.address(0), 0};
  multiply_tile<R, 1>(x, x_stride, panel, k, nothing, bias ? bias_copy : nullptr, copy[0], kPanelWidth);
  for (int r = 0; r < R; ++r) std::memcpy(c + r * c_stride, copy[r], bytes);
}

// One tile of rows over a strip.
struct Pass {
  Span rows;
  Span panels;
  Span k;
  int64_t ahead_panels, ahead_k;  // from here to what comes next; no distance: nothing does
  int64_t share, shares;          // this tile's part of prefetching it
};

// P panels at a time, the rest in halves.
template <int R, int P, class Panel>
void multiply_strip(const LinearParams& p, const Pass& pass, int64_t j) {
  const int64_t whole = p.out_features / kPanelWidth;
  const int64_t last = pass.panels.end < whole ? pass.panels.end : whole;
  const float* x = p.x + pass.rows.begin * p.in_features;
  const Panel weight{static_cast<decltype(Panel::weights)>(p.weight), p.in_features};
  const auto bias = [&] { return p.bias ? p.bias + j * kPanelWidth : nullptr; };
  const auto out = [&] { return p.out + pass.rows.begin * p.out_features + j * kPanelWidth; };
  const bool nothing = pass.ahead_panels == 0 && pass.ahead_k == 0;
  const int64_t step = nothing ? 0 : Panel::kRowBytes / pass.shares;
  const int64_t skip = pass.k.begin + pass.ahead_k;
  const int64_t offset = (pass.k.end - pass.k.begin) * step * pass.share;
  for (; j + P <= last; j += P) {
    const Ahead ahead{weight.next(j + pass.ahead_panels).address(skip) + offset, step};
    multiply_tile<R, P>(x, p.in_features, weight.next(j), pass.k, ahead, bias(), out(), p.out_features);
  }
  if constexpr (P > 1) {
    if (j < pass.panels.end) multiply_strip<R, P / 2, Panel>(p, pass, j);
  } else if (j < pass.panels.end) {
    const int64_t columns = p.out_features - j * kPanelWidth;
    multiply_edge<R>(x, p.in_features, weight.next(j), pass.k, bias(), out(), p.out_features, columns);
  }
}

// Finds the tile made for the number of rows, which is at most R.
template <class Panel, int R = kTileRows>
void multiply(const LinearParams& p, const Pass& pass) {
  if constexpr (R > 1) {
    if (pass.rows.end - pass.rows.begin < R) return multiply<Panel, R - 1>(p, pass);
  }
  multiply_strip<R, tile_panels(R), Panel>(p, pass, pass.panels.begin);
}

// All tiles over one strip, pass by pass. `next` is the distance to the strip that follows, in panels.
template <class Panel>
void multiply_tiles(const LinearParams& p, Span tiles, int64_t num_tiles, Span panels, int64_t next) {
  const int64_t passes = p.num_tokens <= kStreamedRows ? 1 : (p.in_features + kDepth - 1) / kDepth;
  for (int64_t i = 0; i < passes; ++i) {
    const Span k = part_of(p.in_features, passes, i);
    Pass pass{.rows = {},
              .panels = panels,
              .k = k,
              .ahead_panels = 0,
              .ahead_k = k.end - k.begin,
              .share = 0,
              .shares = tiles.end - tiles.begin};
    if (k.end == p.in_features) {
      pass.ahead_panels = next;
      pass.ahead_k = next ? -k.begin : 0;
    }
    for (int64_t tile = tiles.begin; tile < tiles.end; ++tile, ++pass.share) {
      pass.rows = part_of(p.num_tokens, num_tiles, tile);
      multiply<Panel>(p, pass);
    }
  }
}

template <class Panel>
void run(const LinearParams& p) {
  const int64_t panels = num_panels(p.out_features);
  const int64_t tiles = (p.num_tokens + kTileRows - 1) / kTileRows;
  const int64_t blocks = (tiles + kBlockTiles - 1) / kBlockTiles;
  // Many small items, in sizes that tiles divide: where another guest of the machine slows one thread down,
  // the others wait for it at the end of every product, for half an item on average.
  const int64_t unit = p.num_tokens <= kStreamedRows ? kTilePanels : kStrip / 2;
  const int64_t fair = panels * blocks / (num_threads() * 16) / unit * unit;
  const int64_t group = fair < unit ? unit : fair;
  const int64_t groups = (panels + group - 1) / group;
  const int64_t next_item = (num_threads() - 1) * group;  // where this thread probably goes on
  parallel_for(groups * blocks, 1, [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; ++item) {
      const Span block = part_of(tiles, blocks, item % blocks);
      const int64_t begin = item / blocks * group;
      const int64_t end = begin + group < panels ? begin + group : panels;
      const int64_t strip = p.num_tokens <= kStreamedRows ? group : kStrip;
      for (int64_t j = begin; j < end; j += strip) {
        const int64_t strip_end = j + strip < end ? j + strip : end;
        const int64_t next = strip_end < end ? strip : strip_end - j + next_item;
        multiply_tiles<Panel>(p, block, tiles, {j, strip_end}, j + next < panels ? next : 0);
      }
    }
  });
}

}  // namespace

void linear(const LinearParams& p) {
  if (p.num_tokens == 0) return;
  dispatch(p.weight_dtype, [&]<class T>() { run<PlainPanel<T>>(p); });
}

}  // namespace bequest::BEQUEST_ISA
