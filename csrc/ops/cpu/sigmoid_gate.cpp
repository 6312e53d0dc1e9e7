#include "ops/cpu/sigmoid_gate.h"

#include "core/isa.h"

namespace bequest {

BEQUEST_DECLARE_PER_ISA(void sigmoid_gate(const SigmoidGateParams& p))

void sigmoid_gate(const SigmoidGateParams& p) { BEQUEST_DISPATCH_ISA(sigmoid_gate(p)); }

}  // namespace bequest
