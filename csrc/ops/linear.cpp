#include "ops/linear.h"

#include "core/isa.h"

namespace bequest {

BEQUEST_DECLARE_PER_ISA(void linear(const LinearParams& p))

void linear(const LinearParams& p) {
  check(p.num_tokens >= 0 && p.out_features >= 1 && p.in_features >= 1, "linear: empty weight");
  BEQUEST_DISPATCH_ISA(linear(p));
}

}  // namespace bequest
