// Two row tiles × the two panels of a strip are summed in four tiles while k runs, so that each load of a
// tile serves two products. k is cut into parts: that of a strip stays in L1 while all row tiles of the item
// pass over it, and meanwhile each asks for its share of what comes next, which follows in memory.
#include "ops/linear_amx.h"

#include "core/amx_tiles.h"
#include "ops/activation_functions.h"

namespace bequest::amx {
namespace {

constexpr int64_t kSumsInTile = kTileSide * kTileSide;
constexpr int64_t kStripSums = kItemRowTiles * 2 * kSumsInTile;
constexpr int64_t kPartTiles = 16;                   // of k; 32 KiB of a strip
constexpr int64_t kStepLines = 2 * kTileBytes / 64;  // cache lines of a strip per tile of k

// One or two row tiles over a part of a strip.
struct Pass {
  const BFloat16* rows;  // the part's tiles of the first
  int64_t row_stride;    // values to the next row tile
  int64_t row_step;      // values to the next k tile
  const BFloat16* weights;
  int64_t k_tiles;
  bool resumes;         // starts from `sums`
  const char* ahead;    // what to ask for meanwhile
  int64_t ahead_lines;  // per tile of k
  float* sums;          // [row tiles, 2, 16, 16]
};

template <int RowTiles, class F>
[[gnu::always_inline]] inline void each_sum(F f) {
  f.template operator()<0>();
  f.template operator()<1>();
  if constexpr (RowTiles == 2) {
    f.template operator()<2>();
    f.template operator()<3>();
  }
}

template <int RowTiles>
void multiply(Pass pass) {
  if (pass.resumes) {
    each_sum<RowTiles>([&]<int C>() { load_tile<C>(pass.sums + C * kSumsInTile, kTileRowBytes); });
  } else {
    each_sum<RowTiles>([]<int C>() { zero_tile<C>(); });
  }
  for (int64_t k = 0; k < pass.k_tiles; ++k) {
    load_tile<4>(pass.rows, kTileRowBytes);
    load_tile<6>(pass.weights, kTileRowBytes);
    load_tile<7>(pass.weights + kTileValues, kTileRowBytes);
    multiply_tiles<0, 4, 6>();
    multiply_tiles<1, 4, 7>();
    if constexpr (RowTiles == 2) {
      load_tile<5>(pass.rows + pass.row_stride, kTileRowBytes);
      multiply_tiles<2, 5, 6>();
      multiply_tiles<3, 5, 7>();
    }
    for (int64_t line = 0; line < pass.ahead_lines; ++line, pass.ahead += 64)
      __builtin_prefetch(pass.ahead, 0, 2);
    pass.rows += pass.row_step;
    pass.weights += 2 * kTileValues;
  }
  each_sum<RowTiles>([&]<int C>() { store_tile<C>(pass.sums + C * kSumsInTile, kTileRowBytes); });
}

__mmask16 first_lanes(int64_t count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (1 << count) - 1; }

struct Identity {
  static VecF apply(VecF x) { return x; }
};

// Sums and biases of a panel, [rows, 16], to columns of the output as f of them.
template <class F>
void write_panel(const LinearParams& p, const float* sums, int64_t row, int64_t rows, int64_t column) {
  const __mmask16 mask = first_lanes(p.out_features - column);
  const VecF bias = p.bias ? (VecF)_mm512_maskz_loadu_ps(mask, p.bias + column) : VecF{};
  float* out = p.out + row * p.out_features + column;
  for (int64_t r = 0; r < rows; ++r, out += p.out_features)
    _mm512_mask_storeu_ps(out, mask, F::apply(load(sums + r * kTileSide) + bias));
}

// The same of a gate, and what it lets through.
template <class F>
void write_gated_panel(const LinearParams& p, const float* gate, const float* up, int64_t row, int64_t rows,
                       int64_t column) {
  const int64_t width = p.out_features / 2;
  const VecF gate_bias = p.bias ? load(p.bias + column) : VecF{};
  const VecF up_bias = p.bias ? load(p.bias + width + column) : VecF{};
  float* out = p.out + row * width + column;
  for (int64_t r = 0; r < rows; ++r, out += width)
    store(out, F::apply(load(gate + r * kTileSide) + gate_bias) * (load(up + r * kTileSide) + up_bias));
}

// Writes what a row tile's sums [2, 16, 16] of a strip are for.
void finish_tile(const LinearParams& p, int64_t row_tile, int64_t strip, const float* sums) {
  const int64_t row = row_tile * kTileSide;
  const int64_t rows = p.num_tokens - row < kTileSide ? p.num_tokens - row : kTileSide;
  for (int64_t panel = 0; panel < 2; ++panel, sums += kSumsInTile) {
    const int64_t column = strip * kStripWidth + panel * kPanelWidth;
    if (p.gated()) {
      with_activation(p.activation, [&]<class F>() {
        write_gated_panel<F>(p, sums, sums + kStripSums, row, rows, column);
      });
    } else if (p.finish == Finish::kActivated) {
      with_activation(p.activation, [&]<class F>() { write_panel<F>(p, sums, row, rows, column); });
    } else {
      write_panel<Identity>(p, sums, row, rows, column);
    }
  }
}

// The item's row tiles over a strip, whose sums go to `sums`. f(row tile, sums of it) when they are whole.
template <class F>
void multiply_strip(const TiledProduct& product, const TiledItem& item, int64_t strip, float* sums, F f) {
  const int64_t row_step = product.rows_in_tile * kTileDepth;
  const int64_t parts = (product.k_tiles + kPartTiles - 1) / kPartTiles;
  const int64_t passes = (item.row_end - item.row_begin + 1) / 2;
  const auto* weights =
      static_cast<const BFloat16*>(product.params.weight) + strip * product.k_tiles * 2 * kTileValues;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t first = product.k_tiles * part / parts, last = product.k_tiles * (part + 1) / parts;
    Pass pass{.rows = nullptr,
              .row_stride = product.k_tiles * row_step,
              .row_step = row_step,
              .weights = weights + first * 2 * kTileValues,
              .k_tiles = last - first,
              .resumes = part > 0,
              .ahead = reinterpret_cast<const char*>(weights + last * 2 * kTileValues),
              .ahead_lines = (kStepLines + passes - 1) / passes,
              .sums = sums};
    for (int64_t tile = item.row_begin; tile < item.row_end; tile += 2) {
      const int64_t tiles = item.row_end - tile < 2 ? 1 : 2;
      pass.rows = product.rows + tile * pass.row_stride + first * row_step;
      tiles == 2 ? multiply<2>(pass) : multiply<1>(pass);
      if (last == product.k_tiles)
        for (int64_t i = 0; i < tiles; ++i) f(tile + i, pass.sums + i * 2 * kSumsInTile);
      pass.sums += tiles * 2 * kSumsInTile;
      pass.ahead += pass.k_tiles * pass.ahead_lines * 64;
    }
  }
}

}  // namespace

void round_rows(const TiledProduct& product, int64_t begin, int64_t end) {
  const LinearParams& p = product.params;
  BFloat16* to = product.rows + begin * product.rows_in_tile * kTileDepth;
  for (int64_t tile = begin; tile < end; ++tile) {
    const int64_t first_row = tile / product.k_tiles * kTileSide, k = tile % product.k_tiles * kTileDepth;
    const __mmask16 low = first_lanes(p.in_features - k), high = first_lanes(p.in_features - k - kLanes);
    for (int64_t row = first_row; row < first_row + product.rows_in_tile; ++row, to += kTileDepth) {
      const float* x = p.x + row * p.in_features + k;
      const __m512i values = row < p.num_tokens ? round_to_bfloat16(_mm512_maskz_loadu_ps(low, x),
                                                                    _mm512_maskz_loadu_ps(high, x + kLanes))
                                                : _mm512_setzero_si512();
      _mm512_store_si512(to, values);
    }
  }
}

void multiply_strips(const TiledProduct& product, const TiledItem& item, float* sums) {
  const LinearParams& p = product.params;
  TileSizes sizes;
  for (int tile = 0; tile < 6; ++tile) sizes.rows[tile] = static_cast<uint8_t>(product.rows_in_tile);
  const TileScope scope(sizes);
  for (int64_t strip = item.strip_begin; strip < item.strip_end; ++strip) {
    const auto finish = [&](int64_t tile, const float* gate) { finish_tile(p, tile, strip, gate); };
    if (!p.gated()) {
      multiply_strip(product, item, strip, sums, finish);
      continue;
    }
    multiply_strip(product, item, strip, sums, [](int64_t, const float*) {});
    const int64_t up = strip + num_strips(p.out_features) / 2;
    multiply_strip(product, item, up, sums + kStripSums,
                   [&](int64_t tile, const float* of_up) { finish(tile, of_up - kStripSums); });
  }
}

}  // namespace bequest::amx
