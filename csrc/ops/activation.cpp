#include "ops/activation.h"

#include "core/isa.h"

namespace bequest {

BEQUEST_DECLARE_PER_ISA(void gated_activation(const GatedParams& p))

void gated_activation(const GatedParams& p) {
  check(p.num_tokens >= 0 && p.intermediate >= 1, "gated_activation: empty rows");
  BEQUEST_DISPATCH_ISA(gated_activation(p));
}

}  // namespace bequest
