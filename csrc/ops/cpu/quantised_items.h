// A product over codes cut into items of work; for the files that dispatch.
#pragma once

#include <algorithm>

#include "core/threads.h"
#include "ops/cpu/linear_quantised.h"

namespace bequest {

// f(item, worker) for each item of the product.
template <class F>
void for_each_quantised_item(const LinearParams& p, const QuantisedCut& cut, F f) {
  // Those of a gate stand for those of the other half too.
  const int64_t panels = num_panels(p.out_features) / (p.gated() ? 2 : 1);
  const int64_t blocks = (p.num_tokens + cut.rows - 1) / cut.rows;
  // Many small items: where another guest of the machine slows one thread down, the others wait for it at the
  // end of every product, for half an item on average.
  const int64_t fair = panels * blocks / (num_threads() * 16) / cut.panels * cut.panels;
  const int64_t group = std::max(fair, cut.panels);
  const int64_t groups = (panels + group - 1) / group;
  for_each_item(groups * blocks, [&](int64_t i, int worker) {
    const int64_t block = i / groups, first = i % groups * group;
    f(QuantisedItem{.row_begin = p.num_tokens * block / blocks,
                    .row_end = p.num_tokens * (block + 1) / blocks,
                    .panel_begin = first,
                    .panel_end = std::min(first + group, panels)},
      worker);
  });
}

}  // namespace bequest
