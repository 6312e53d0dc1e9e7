#include "core/isa.h"
#include "ops/cpu/linear.h"

namespace bequest {

BEQUEST_DECLARE_PER_ISA(void pack_weight(const PackParams& p))

void pack_weight(const PackParams& p) {
  check(p.first_row >= 0 && p.rows >= 0 && p.in_features >= 1, "pack_weight: empty weight");
  check(!is_codes(p.format), "pack_weight: codes are not numbers");
  BEQUEST_DISPATCH_ISA(pack_weight(p));
}

}  // namespace bequest
