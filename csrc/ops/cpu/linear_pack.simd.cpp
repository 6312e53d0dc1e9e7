// Packing is a transposition of 16 rows, bound by memory: kLanes values of k are converted at a time in a
// small square that stays in registers and L1, then written as whole rows of the panel.
#include "core/simd.h"
#include "core/threads.h"
#include "ops/cpu/linear.h"

namespace bequest::BEQUEST_ISA {
namespace {

constexpr int64_t kSpan = 16;  // values of k per square

// Where values of a panel go: panels of whole rows of k, or one of the two tiles of a strip.
template <class To>
struct PlainPlaces {
  using Value = To;
  To* first;

  PlainPlaces(const PackParams& p, int64_t column)
      : first(static_cast<To*>(p.packed) + column * p.in_features) {}
  To& at(int64_t k, int64_t column) const { return first[k * kPanelWidth + column]; }
};
struct TiledPlaces {
  using Value = BFloat16;
  BFloat16* first;

  TiledPlaces(const PackParams& p, int64_t column)
      : first(static_cast<BFloat16*>(p.packed) + tiled_column(column, p.in_features)) {}
  BFloat16& at(int64_t k, int64_t column) const { return first[tiled_depth(k) + column * 2]; }
};

// Columns [begin, end) of one panel from as many rows of the weight.
template <class From, class Places>
void pack_panel(const From* rows, Places to, int64_t depth, int64_t begin, int64_t end) {
  float square[kPanelWidth][kSpan];
  for (int64_t k = 0; k < depth; k += kSpan) {
    const int64_t span = depth - k < kSpan ? depth - k : kSpan;
    for (int64_t c = begin; c < end; ++c) {
      const From* row = rows + (c - begin) * depth + k;
      for (int64_t i = 0; i < span; ++i) square[c][i] = to_float(row[i]);
    }
    for (int64_t i = 0; i < span; ++i)
      for (int64_t c = begin; c < end; ++c)
        to.at(k + i, c) = from_float<typename Places::Value>(square[c][i]);
  }
}

template <class From, class Places>
void pack(const PackParams& p) {
  const int64_t depth = p.in_features;
  const int64_t last_row = p.first_row + p.rows;
  const int64_t first_panel = p.first_row / kPanelWidth;
  parallel_for(num_panels(last_row) - first_panel, 4, [&](int64_t first, int64_t last) {
    for (int64_t panel = first_panel + first; panel < first_panel + last; ++panel) {
      const int64_t base = panel * kPanelWidth;
      const int64_t begin = p.first_row > base ? p.first_row : base;
      const int64_t end = last_row < base + kPanelWidth ? last_row : base + kPanelWidth;
      pack_panel(static_cast<const From*>(p.weight) + (begin - p.first_row) * depth, Places(p, base), depth,
                 begin - base, end - base);
    }
  });
}

}  // namespace

void pack_weight(const PackParams& p) {
  dispatch(p.weight_dtype, [&]<class From>() {
    if (p.format == WeightFormat::kTiles) return pack<From, TiledPlaces>(p);
    dispatch(static_cast<DType>(p.format), [&]<class To>() { pack<From, PlainPlaces<To>>(p); });
  });
}

}  // namespace bequest::BEQUEST_ISA
