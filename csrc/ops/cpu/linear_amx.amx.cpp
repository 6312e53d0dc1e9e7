// Two row tiles × the two panels of a strip are summed in four tiles while k runs, so that each load of a
// tile serves two products. k is cut twice:
//
//   part     its weights of a strip stay in L1 while all row tiles of the item pass over them
//   stretch  its rows of the item stay in L2 while all strips of the item pass over them
//
// Meanwhile each pass asks for its share of the weights that come next.
#include "ops/cpu/linear_amx.h"

#include "core/amx_tiles.h"
#include "ops/cpu/quick_activations.h"

namespace bequest::amx {
namespace {

constexpr int64_t kSumsInTile = kTileSide * kTileSide;
constexpr int64_t kStripSums = kItemRowTiles * 2 * kSumsInTile;
constexpr int64_t kPartTiles = 16;                   // of k: 32 KiB of a strip
constexpr int64_t kStretchTiles = 1024;              // of rows: 1 MiB
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

// `pending` does something of its own work per tile of k, while the units multiply.
template <int RowTiles, class Pending>
void multiply(Pass pass, Pending& pending) {
  if (pass.resumes) {
    each_sum<RowTiles>([&]<int C>() { load_tile<C>(pass.sums + C * kSumsInTile, kTileRowBytes); });
  } else {
    each_sum<RowTiles>([]<int C>() { zero_tile<C>(); });
  }
  const int64_t pace = pending.pace(pass.k_tiles);
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
    pending.advance(pace);
    pass.rows += pass.row_step;
    pass.weights += 2 * kTileValues;
  }
  each_sum<RowTiles>([&]<int C>() { store_tile<C>(pass.sums + C * kSumsInTile, kTileRowBytes); });
}

__mmask16 first_lanes(int64_t count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (1 << count) - 1; }

struct Identity {
  static VecF apply(VecF x) { return x; }
};

// Two vectors of a row of a strip's sums and biases, as f of them, or what they gate.
template <class F>
struct PlainResults {
  static constexpr int64_t kHalves = 1;
  VecF bias[2] = {};

  PlainResults() = default;
  PlainResults(const LinearParams& p, int64_t column, int64_t) {
    for (int i = 0; i < 2; ++i, column += kLanes)
      bias[i] = p.bias ? (VecF)_mm512_maskz_loadu_ps(first_lanes(p.out_features - column), p.bias + column)
                       : VecF{};
  }
  VecF operator()(const float* sums, int i) const { return F::apply(load(sums + i * kSumsInTile) + bias[i]); }
};
template <class F>
struct GatedResults {
  static constexpr int64_t kHalves = 2;  // strips that a result is made of
  VecF gate_bias[2] = {}, up_bias[2] = {};
  int64_t to_gate = 0;  // from the sums of the other half back to the gate's

  GatedResults() = default;
  GatedResults(const LinearParams& p, int64_t column, int64_t gate) : to_gate(gate) {
    for (int i = 0; i < 2; ++i, column += kLanes) {
      gate_bias[i] = p.bias ? load(p.bias + column) : VecF{};
      up_bias[i] = p.bias ? load(p.bias + p.out_features / 2 + column) : VecF{};
    }
  }
  VecF operator()(const float* sums, int i) const {
    const float* up = sums + i * kSumsInTile;
    return F::apply(load(up - to_gate) + gate_bias[i]) * F::factor(load(up) + up_bias[i]);
  }
};

// Makes results of the sums of a pass and writes them: to columns of the output at once; to tiles of the rows
// of the next product a few rows at a time, while the units are busy with the next pass.
template <class Results>
class PendingRows {
 public:
  explicit PendingRows(const TiledProduct& product) : product_(product) {}
  ~PendingRows() { advance(end_); }
  PendingRows(const PendingRows&) = delete;
  PendingRows& operator=(const PendingRows&) = delete;

  // Takes the sums [row tiles, 2, 16, 16] of some row tiles from `row_tile` on over.
  void start(int64_t row_tile, int64_t row_tiles, int64_t strip, const float* sums, int64_t to_gate) {
    advance(end_);
    const LinearParams& p = product_.params;
    const int64_t first = row_tile * kTileSide, column = strip * kStripWidth;
    results_ = Results(p, column, to_gate);
    sums_ = sums;
    row_ = 0;
    end_ = p.num_tokens - first < row_tiles * kTileSide ? p.num_tokens - first : row_tiles * kTileSide;
    if (product_.inner != nullptr) {
      const int64_t tile_values = product_.rows_in_tile() * kTileDepth;
      tile_stride_ = product_.strips() * tile_values;
      inner_ = product_.inner + row_tile * tile_stride_ + strip * tile_values;
      return;
    }
    if (product_.kv != nullptr && column >= product_.kv->first) return write_to_cache(first, column);
    width_ = product_.kv != nullptr ? product_.kv->first : p.gated() ? p.out_features / 2 : p.out_features;
    low_ = first_lanes(width_ - column);
    high_ = first_lanes(width_ - column - kLanes);
    out_ = p.out + first * width_ + column;
    advance(end_);  // stores that wait for memory would make the units wait for their rows
  }

  // Rows per step, so that all are done in so many.
  int64_t pace(int64_t steps) const { return (end_ - row_ + steps - 1) / steps; }

  [[gnu::always_inline]] void advance(int64_t rows) {
    const int64_t begin = row_, end = end_ - begin < rows ? end_ : begin + rows;
    row_ = end;
    // Copies: what is stored might be any of the members, as far as the compiler knows.
    const Results results = results_;
    const float* const sums = sums_;
    const auto sums_of = [&](int64_t row) {
      return sums + row / kTileSide * 2 * kSumsInTile + row % kTileSide * kTileSide;
    };
    if (BFloat16* const inner = inner_; inner != nullptr) {
      const int64_t to_next_tile = tile_stride_;
      for (int64_t row = begin; row < end; ++row)
        _mm512_store_si512(inner + row / kTileSide * to_next_tile + row % kTileSide * kTileDepth,
                           round_to_bfloat16(results(sums_of(row), 0), results(sums_of(row), 1)));
      return;
    }
    const __mmask16 low = low_, high = high_;
    const int64_t width = width_;
    float* out = out_ + begin * width;
    for (int64_t row = begin; row < end; ++row, out += width) {
      _mm512_mask_storeu_ps(out, low, results(sums_of(row), 0));
      _mm512_mask_storeu_ps(out + kLanes, high, results(sums_of(row), 1));
    }
  }

 private:
  void write_to_cache(int64_t first, int64_t column) {
    const KvColumns& kv = *product_.kv;
    const KvLayout& layout = kv.layout;
    const int64_t dim = layout.head_dim, keys = layout.num_kv_heads * dim;
    const int64_t head = (column - kv.first) % keys / dim, depth = (column - kv.first) % dim;
    BFloat16* const to = kv.kv_cache + depth + (column - kv.first < keys ? 0 : layout.values_after_keys());
    const Results results = results_;
    for (; row_ < end_; ++row_) {
      const int64_t slot = kv.slots[first + row_];
      if (slot < 0) continue;
      const float* sums = sums_ + row_ / kTileSide * 2 * kSumsInTile + row_ % kTileSide * kTileSide;
      _mm512_storeu_si512(to + layout.key_of_slot(slot, kv.layer, head),
                          round_to_bfloat16(results(sums, 0), results(sums, 1)));
    }
  }

  const TiledProduct& product_;
  Results results_;
  const float* sums_ = nullptr;
  int64_t row_ = 0, end_ = 0;
  BFloat16* inner_ = nullptr;
  int64_t tile_stride_ = 0;
  float* out_ = nullptr;
  int64_t width_ = 0;
  __mmask16 low_ = 0, high_ = 0;
};

struct Span {
  int64_t begin, end;
};

// Part `index` of [0, count) cut into `parts` that differ by one at most.
Span part_of(int64_t count, int64_t parts, int64_t index) {
  return {count * index / parts, count * (index + 1) / parts};
}

// The item's row tiles over a stretch of a strip, whose sums go to `sums`. `next` is the strip's successor.
// f(row tile, how many, their sums) when they are whole.
template <class Pending, class F>
void multiply_stretch(const TiledProduct& product, Span row_tiles, const BFloat16* weights, Span stretch,
                      const BFloat16* next, float* sums, Pending& pending, F f) {
  const int64_t row_step = product.rows_in_tile() * kTileDepth, k_tiles = product.k_tiles();
  const int64_t depth = stretch.end - stretch.begin, parts = (depth + kPartTiles - 1) / kPartTiles;
  const int64_t passes = (row_tiles.end - row_tiles.begin + 1) / 2;
  for (int64_t part = 0; part < parts; ++part) {
    const Span k = part_of(depth, parts, part);
    const int64_t first = stretch.begin + k.begin, last = stretch.begin + k.end;
    Pass pass{
        .rows = nullptr,
        .row_stride = k_tiles * row_step,
        .row_step = row_step,
        .weights = weights + first * 2 * kTileValues,
        .k_tiles = last - first,
        .resumes = first > 0,
        .ahead = reinterpret_cast<const char*>(part + 1 < parts ? weights + last * 2 * kTileValues : next),
        .ahead_lines = (kStepLines + passes - 1) / passes,
        .sums = sums};
    for (int64_t tile = row_tiles.begin; tile < row_tiles.end; tile += 2) {
      const int64_t tiles = row_tiles.end - tile < 2 ? 1 : 2;
      pass.rows = product.rows + tile * pass.row_stride + first * row_step;
      tiles == 2 ? multiply<2>(pass, pending) : multiply<1>(pass, pending);
      if (last == k_tiles) f(tile, tiles, pass.sums);
      pass.sums += tiles * 2 * kSumsInTile;
      pass.ahead += pass.k_tiles * pass.ahead_lines * 64;
    }
  }
}

// Where there is nothing to do meanwhile.
struct NothingPending {
  int64_t pace(int64_t) const { return 0; }
  void advance(int64_t) const {}
};

// `rows` takes the sums, `meanwhile` works while the units do: the same, or nothing.
template <class Results, class Pending>
void multiply_item(const TiledProduct& product, const TiledItem& item, float* sums,
                   PendingRows<Results>& rows, Pending& meanwhile) {
  const int64_t k_tiles = product.k_tiles(), to_other_half = product.strips();
  const int64_t halves = Results::kHalves, strips = item.strip_end - item.strip_begin;
  const int64_t stretch_tiles = kStretchTiles / (item.row_end - item.row_begin);
  const int64_t stretches = (k_tiles + stretch_tiles - 1) / stretch_tiles;
  const auto weights = [&](int64_t i, int64_t k) {  // of the item's strip number i, both halves counted
    const int64_t strip = item.strip_begin + i % strips + i / strips * to_other_half;
    return static_cast<const BFloat16*>(product.params.weight) + (strip * k_tiles + k) * 2 * kTileValues;
  };
  for (int64_t s = 0; s < stretches; ++s) {
    const Span stretch = part_of(k_tiles, stretches, s);
    for (int64_t i = 0; i < halves * strips; ++i) {
      const bool last = i + 1 == halves * strips;
      const BFloat16* next = last ? weights(0, stretch.end) : weights(i + 1, stretch.begin);
      if (last && s + 1 == stretches) next = weights(i, k_tiles);  // where this thread probably goes on
      multiply_stretch(product, {item.row_begin, item.row_end}, weights(i, 0), stretch, next,
                       sums + i * kStripSums, meanwhile,
                       [&](int64_t tile, int64_t tiles, const float* whole) {
                         if (i / strips + 1 < halves) return;  // a gate waits for what it gates
                         rows.start(tile, tiles, item.strip_begin + i % strips, whole, strips * kStripSums);
                       });
    }
  }
}

template <class Results>
void multiply_item(const TiledProduct& product, const TiledItem& item, float* sums) {
  PendingRows<Results> rows(product);
  NothingPending nothing;
  product.inner != nullptr ? multiply_item(product, item, sums, rows, rows)
                           : multiply_item(product, item, sums, rows, nothing);
}

}  // namespace

void round_rows(const TiledProduct& product, int64_t begin, int64_t end) {
  const LinearParams& p = product.params;
  const int64_t k_tiles = product.k_tiles(), rows_in_tile = product.rows_in_tile();
  BFloat16* to = product.rows + begin * rows_in_tile * kTileDepth;
  for (int64_t tile = begin; tile < end; ++tile) {
    const int64_t first_row = tile / k_tiles * kTileSide, k = tile % k_tiles * kTileDepth;
    const __mmask16 low = first_lanes(p.in_features - k), high = first_lanes(p.in_features - k - kLanes);
    for (int64_t row = first_row; row < first_row + rows_in_tile; ++row, to += kTileDepth) {
      const float* x = p.x + row * p.x_stride + k;
      const __m512i values = row < p.num_tokens ? round_to_bfloat16(_mm512_maskz_loadu_ps(low, x),
                                                                    _mm512_maskz_loadu_ps(high, x + kLanes))
                                                : _mm512_setzero_si512();
      _mm512_store_si512(to, values);
    }
  }
}

void round_row(const TiledProduct& product, int64_t row, const float* from) {
  const int64_t k_tiles = product.k_tiles(), width = product.params.in_features;
  const int64_t tile_values = product.rows_in_tile() * kTileDepth;
  BFloat16* to = product.rows + row / kTileSide * k_tiles * tile_values + row % kTileSide * kTileDepth;
  for (int64_t k = 0; k < k_tiles * kTileDepth; k += kTileDepth, to += tile_values) {
    const __mmask16 low = from ? first_lanes(width - k) : 0,
                    high = from ? first_lanes(width - k - kLanes) : 0;
    _mm512_store_si512(to, round_to_bfloat16(_mm512_maskz_loadu_ps(low, from + k),
                                             _mm512_maskz_loadu_ps(high, from + k + kLanes)));
  }
}

void multiply_strips(const TiledProduct& product, const TiledItem& item, float* sums) {
  TileSizes sizes;
  for (int tile = 0; tile < 6; ++tile) sizes.rows[tile] = static_cast<uint8_t>(product.rows_in_tile());
  const TileScope scope(sizes);
  const LinearParams& p = product.params;
  if (p.finish == Finish::kSum) return multiply_item<PlainResults<Identity>>(product, item, sums);
  with_quick_activation(p.activation, [&]<class F>() {
    p.gated() ? multiply_item<GatedResults<F>>(product, item, sums)
              : multiply_item<PlainResults<F>>(product, item, sums);
  });
}

}  // namespace bequest::amx
