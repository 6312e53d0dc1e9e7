#include "ops/linear.h"

#include "core/simd.h"
#include "core/threads.h"

namespace bequest::BEQUEST_ISA {
namespace {

constexpr int kVecs = kPanelWidth / kLanes;  // vectors per row of a panel

// What the register file allows: accumulators of one tile, in vectors.
#if defined(BEQUEST_ISA_avx2)
constexpr int kAccumulators = 12;
constexpr int kTileRows = 6;
#elif defined(BEQUEST_ISA_neon)
constexpr int kAccumulators = 24;
constexpr int kTileRows = 6;
#else
constexpr int kAccumulators = 24;
constexpr int kTileRows = 12;
#endif

// How a panel of weights is read: the door for other storage formats.
template <class T>
struct PlainPanel {
  const T* weights;  // [K, 16]

  static PlainPanel at(const LinearParams& p, int64_t panel) {
    return {static_cast<const T*>(p.weight) + panel * p.in_features * kPanelWidth};
  }
  VecF row(int64_t k, int vec) const { return load(weights + k * kPanelWidth + vec * kLanes); }
};

constexpr int tile_panels(int rows) {
  const int fit = kAccumulators / (rows * kVecs);
  return fit > 8 ? 8 : fit < 1 ? 1 : fit;
}

// Rows [row, row + R) × panels [panel, panel + P) over k in [k_begin, k_end).
template <class Panel, int R, int P>
void multiply_tile(const LinearParams& p, int64_t row, int64_t panel, int64_t k_begin, int64_t k_end) {
  const int64_t depth = p.in_features;
  const int64_t width = p.out_features;
  const float* x = p.x + row * depth;
  float* out = p.out + row * width + panel * kPanelWidth;
  Panel panels[P];
  for (int j = 0; j < P; ++j) panels[j] = Panel::at(p, panel + j);
  const int64_t columns = width - panel * kPanelWidth;  // those of the last panel may be fewer than 16
  const bool whole = columns >= P * kPanelWidth;

  VecF acc[R][P][kVecs];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < P; ++j)
      for (int v = 0; v < kVecs; ++v) acc[r][j][v] = VecF{};
  for (int64_t k = k_begin; k < k_end; ++k) {
    VecF b[P][kVecs];
    for (int j = 0; j < P; ++j)
      for (int v = 0; v < kVecs; ++v) b[j][v] = panels[j].row(k, v);
    for (int r = 0; r < R; ++r) {
      const VecF a = broadcast(x[r * depth + k]);
      for (int j = 0; j < P; ++j)
        for (int v = 0; v < kVecs; ++v) acc[r][j][v] = a * b[j][v] + acc[r][j][v];
    }
  }
  if (whole) {
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < P; ++j)
        for (int v = 0; v < kVecs; ++v) store(out + r * width + j * kPanelWidth + v * kLanes, acc[r][j][v]);
  } else {
    float edge[R][P * kPanelWidth];
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < P; ++j)
        for (int v = 0; v < kVecs; ++v) store(&edge[r][j * kPanelWidth + v * kLanes], acc[r][j][v]);
    for (int r = 0; r < R; ++r)
      for (int64_t c = 0; c < columns; ++c) out[r * width + c] = edge[r][c];
  }
}

template <class Panel, int R, int P = tile_panels(R)>
void multiply_rows(const LinearParams& p, int64_t row, int64_t first, int64_t last) {
  for (; first + P <= last; first += P) multiply_tile<Panel, R, P>(p, row, first, 0, p.in_features);
  if constexpr (P > 1) {
    if (first < last) multiply_rows<Panel, R, P / 2>(p, row, first, last);
  }
}

template <class Panel>
void multiply(const LinearParams& p, int64_t row, int64_t rows, int64_t first, int64_t last) {
  switch (rows) {
    case 1:
      return multiply_rows<Panel, 1>(p, row, first, last);
    case 2:
      return multiply_rows<Panel, 2>(p, row, first, last);
    case 3:
      return multiply_rows<Panel, 3>(p, row, first, last);
    case 4:
      return multiply_rows<Panel, 4>(p, row, first, last);
    case 5:
      return multiply_rows<Panel, 5>(p, row, first, last);
    case 6:
      return multiply_rows<Panel, 6>(p, row, first, last);
  }
}

template <class Panel>
void run(const LinearParams& p) {
  parallel_for(num_panels(p.out_features), 8, [&](int64_t first, int64_t last) {
    for (int64_t row = 0; row < p.num_tokens; row += 6) {
      const int64_t rows = p.num_tokens - row < 6 ? p.num_tokens - row : 6;
      multiply<Panel>(p, row, rows, first, last);
      if (p.bias)
        for (int64_t r = row; r < row + rows; ++r)
          for (int64_t c = first * kPanelWidth; c < last * kPanelWidth && c < p.out_features; ++c)
            p.out[r * p.out_features + c] += p.bias[c];
    }
  });
}

}  // namespace

void linear(const LinearParams& p) {
  if (p.num_tokens == 0) return;
  dispatch(p.weight_dtype, [&]<class T>() { run<PlainPanel<T>>(p); });
}

}  // namespace bequest::BEQUEST_ISA
