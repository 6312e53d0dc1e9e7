// Packing is a transposition of 16 rows, bound by memory: kLanes values of k are converted at a time in a
// small square that stays in registers and L1, then written as whole rows of the panel.
#include "core/simd.h"
#include "core/threads.h"
#include "ops/linear.h"

namespace bequest::BEQUEST_ISA {
namespace {

constexpr int64_t kSpan = 16;  // values of k per square

// Columns [begin, end) of one panel from as many rows of the weight.
template <class From, class To>
void pack_panel(const From* rows, To* panel, int64_t depth, int64_t begin, int64_t end) {
  float square[kPanelWidth][kSpan];
  for (int64_t k = 0; k < depth; k += kSpan) {
    const int64_t span = depth - k < kSpan ? depth - k : kSpan;
    for (int64_t c = begin; c < end; ++c) {
      const From* row = rows + (c - begin) * depth + k;
      for (int64_t i = 0; i < span; ++i) square[c][i] = to_float(row[i]);
    }
    for (int64_t i = 0; i < span; ++i) {
      To* line = panel + (k + i) * kPanelWidth;
      for (int64_t c = begin; c < end; ++c) line[c] = from_float<To>(square[c][i]);
    }
  }
}

template <class From, class To>
void pack(const PackParams& p) {
  const int64_t depth = p.in_features;
  const int64_t last_row = p.first_row + p.rows;
  const int64_t first_panel = p.first_row / kPanelWidth;
  parallel_for(num_panels(last_row) - first_panel, 4, [&](int64_t first, int64_t last) {
    for (int64_t panel = first_panel + first; panel < first_panel + last; ++panel) {
      const int64_t base = panel * kPanelWidth;
      const int64_t begin = p.first_row > base ? p.first_row : base;
      const int64_t end = last_row < base + kPanelWidth ? last_row : base + kPanelWidth;
      pack_panel(static_cast<const From*>(p.weight) + (begin - p.first_row) * depth,
                 static_cast<To*>(p.packed) + base * depth, depth, begin - base, end - base);
    }
  });
}

}  // namespace

void pack_weight(const PackParams& p) {
  dispatch(p.weight_dtype,
           [&]<class From>() { dispatch(p.packed_dtype, [&]<class To>() { pack<From, To>(p); }); });
}

}  // namespace bequest::BEQUEST_ISA
