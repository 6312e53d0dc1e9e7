#include "ops/cpu/linear.h"

#include "core/isa.h"
#include "ops/cpu/linear_amx.h"
#include "ops/cpu/linear_integer.h"
#include "ops/cpu/linear_quantised.h"

namespace bequest {

BEQUEST_DECLARE_PER_ISA(void linear(const LinearParams& p))

void linear(const LinearParams& p) {
  check(p.num_tokens >= 0 && p.out_features >= 1 && p.in_features >= 1, "linear: empty weight");
  const bool tiles = p.format == WeightFormat::kTiles;
  check(!p.gated() || can_gate(p.format, p.out_features), "linear: cannot gate this weight");
  check(p.finish != Finish::kActivated || tiles, "linear: cannot activate these sums");
  if (p.num_tokens == 0) return;
  if (is_fast(p.format)) return linear_integer(p);
  if (is_codes(p.format)) return linear_quantised(p);
  if (tiles) return linear_amx(p);
  BEQUEST_DISPATCH_ISA(linear(p));
}

}  // namespace bequest
