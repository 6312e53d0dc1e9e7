#include "ops/cpu/linear_quantised.h"

#include <cstdlib>
#include <memory>

#include "ops/cpu/quantised_items.h"

namespace bequest {
namespace {

QuantisedCut quantised_cut(const LinearParams& p) { BEQUEST_DISPATCH_ISA(quantised_cut(p)); }
void multiply_quantised(const LinearParams& p, const QuantisedItem& item, float* scratch) {
  BEQUEST_DISPATCH_ISA(multiply_quantised(p, item, scratch));
}

}  // namespace

void linear_quantised(const LinearParams& p) {
  check(p.in_features % 32 == 0, "linear: codes come in groups of 32");
  const QuantisedCut cut = quantised_cut(p);
  // malloc keeps what the last call freed.
  const std::unique_ptr<void, decltype(&std::free)> scratch(
      std::aligned_alloc(64, static_cast<size_t>(cut.scratch_bytes * num_threads()) + 64), &std::free);
  check(scratch != nullptr, "linear: out of memory");
  for_each_quantised_item(p, cut, [&](const QuantisedItem& item, int worker) {
    multiply_quantised(p, item, static_cast<float*>(scratch.get()) + worker * (cut.scratch_bytes / 4));
  });
}

}  // namespace bequest
