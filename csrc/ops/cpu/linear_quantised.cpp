#include "ops/cpu/linear_quantised.h"

#include <cstdlib>
#include <memory>

#include "core/threads.h"

namespace bequest {
namespace {

QuantisedCut quantised_cut(const LinearParams& p) { BEQUEST_DISPATCH_ISA(quantised_cut(p)); }
void multiply_quantised(const LinearParams& p, const QuantisedItem& item, float* scratch) {
  BEQUEST_DISPATCH_ISA(multiply_quantised(p, item, scratch));
}

}  // namespace

void linear_quantised(const LinearParams& p) {
  check(p.in_features % 32 == 0, "linear: codes come in groups of 32");
  const int threads = num_threads();
  const QuantisedCut cut = quantised_cut(p);
  // malloc keeps what the last call freed.
  const std::unique_ptr<void, decltype(&std::free)> scratch(
      std::aligned_alloc(64, static_cast<size_t>(cut.scratch_bytes * threads) + 64), &std::free);
  check(scratch != nullptr, "linear: out of memory");
  // Those of a gate stand for those of the other half too.
  const int64_t panels = num_panels(p.out_features) / (p.gated() ? 2 : 1);
  const int64_t blocks = (p.num_tokens + cut.rows - 1) / cut.rows;
  // Many small items: where another guest of the machine slows one thread down, the others wait for it at the
  // end of every product, for half an item on average.
  const int64_t fair = panels * blocks / (threads * 16) / cut.panels * cut.panels;
  const int64_t group = std::max(fair, cut.panels);
  const int64_t groups = (panels + group - 1) / group;
  for_each_item(groups * blocks, [&](int64_t i, int worker) {
    const int64_t block = i / groups, first = i % groups * group;
    const QuantisedItem item{.row_begin = p.num_tokens * block / blocks,
                             .row_end = p.num_tokens * (block + 1) / blocks,
                             .panel_begin = first,
                             .panel_end = std::min(first + group, panels)};
    multiply_quantised(p, item, static_cast<float*>(scratch.get()) + worker * (cut.scratch_bytes / 4));
  });
}

}  // namespace bequest
