// Products over weights stored as numbers. A work item is a group of panels × a block of rows. It goes over
// its panels in strips, each small enough to stay in L2 while all tiles of rows pass over it.
//
// With few rows the time goes into reading weights. One to three rows stream eight panels at once, which
// keeps the hardware's prefetchers busy; wider tiles read fewer streams and would wait for memory in every
// page, so all tiles of a strip together prefetch the next strip, each its share, evenly spread over its
// multiply-adds.
#include "core/threads.h"
#include "ops/cpu/linear_tiles.h"

namespace bequest::BEQUEST_ISA {
namespace {

constexpr int64_t kBlockTiles = 16;  // tiles of rows per work item
constexpr int64_t kStrip = 12;       // panels per strip; most numbers of panels in a tile divide it

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
  const int64_t depth = pass.k.end - pass.k.begin;
  const Panel weight{static_cast<decltype(Panel::weights)>(p.weight), p.in_features * kPanelWidth};
  const auto operands = [&] {
    const bool ends = p.bias && pass.k.end == p.in_features;
    return TileOperands{.x = p.x + pass.rows.begin * p.x_stride + pass.k.begin,
                        .x_stride = p.x_stride,
                        .depth = depth,
                        .resumes = pass.k.begin > 0,
                        .bias = ends ? p.bias + j * kPanelWidth : nullptr,
                        .c = p.out + pass.rows.begin * p.out_features + j * kPanelWidth,
                        .c_stride = p.out_features};
  };
  const bool nothing = pass.ahead_panels == 0 && pass.ahead_k == 0;
  const int64_t step = nothing ? 0 : Panel::kRowBytes / pass.shares;
  const int64_t offset = depth * step * pass.share;
  for (; j + P <= last; j += P) {
    const Panel ahead = weight.next(j + pass.ahead_panels).from(pass.k.begin + pass.ahead_k);
    multiply_tile<R, P>(operands(), weight.next(j).from(pass.k.begin), {ahead.address() + offset, step});
  }
  if constexpr (P > 1) {
    if (j < pass.panels.end) multiply_strip<R, P / 2, Panel>(p, pass, j);
  } else if (j < pass.panels.end) {
    multiply_edge<R>(operands(), p.out_features - j * kPanelWidth, [&](const TileOperands& edge) {
      multiply_tile<R, 1>(edge, weight.next(j).from(pass.k.begin), {weight.address(), 0});
    });
  }
}

// Finds the tile made for the number of rows, which is at most R.
template <class Panel, int R = kTileRows>
void multiply(const LinearParams& p, const Pass& pass) {
  if constexpr (R > 1) {
    if (pass.rows.end - pass.rows.begin < R) return multiply<Panel, R - 1>(p, pass);
  }
  constexpr int kMost = R <= kStreamedRows ? streamed_panels<Panel::kRowBytes>() : kTilePanels;
  constexpr int kPanels = tile_panels(R) < kMost ? tile_panels(R) : kMost;
  multiply_strip<R, kPanels, Panel>(p, pass, pass.panels.begin);
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
  dispatch(static_cast<DType>(p.format), [&]<class T>() { run<PlainPanel<T>>(p); });
}

}  // namespace bequest::BEQUEST_ISA
