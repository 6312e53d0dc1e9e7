#include "ops/linear.h"

#include "core/isa.h"
#include "ops/linear_quantised.h"

namespace bequest {

BEQUEST_DECLARE_PER_ISA(void linear(const LinearParams& p))

void linear(const LinearParams& p) {
  check(p.num_tokens >= 0 && p.out_features >= 1 && p.in_features >= 1, "linear: empty weight");
  const bool codes = p.format == WeightFormat::kQ4 || p.format == WeightFormat::kQ8;
  check(!p.gated || (codes && p.out_features % (2 * kPanelWidth) == 0), "linear: cannot gate this weight");
  if (p.num_tokens == 0) return;
  if (codes) return linear_quantised(p);
  BEQUEST_DISPATCH_ISA(linear(p));
}

}  // namespace bequest
