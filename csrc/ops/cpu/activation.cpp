#include "ops/cpu/activation.h"

#include "core/isa.h"

namespace bequest {

BEQUEST_DECLARE_PER_ISA(void gated_activation(const GatedParams& p))
BEQUEST_DECLARE_PER_ISA(void activate(float* x, int64_t count, Activation activation))

void gated_activation(const GatedParams& p) {
  check(p.num_tokens >= 0 && p.intermediate >= 1, "gated_activation: empty rows");
  BEQUEST_DISPATCH_ISA(gated_activation(p));
}

void activate(float* x, int64_t count, Activation activation) {
  check(count >= 0, "activate: negative count");
  BEQUEST_DISPATCH_ISA(activate(x, count, activation));
}

}  // namespace bequest
