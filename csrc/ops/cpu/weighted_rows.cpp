#include "ops/cpu/weighted_rows.h"

#include "core/isa.h"

namespace bequest {

BEQUEST_DECLARE_PER_ISA(void add_weighted_rows(const WeightedRowsParams& p))
BEQUEST_DECLARE_PER_ISA(void make_gates(const float* x, float* out, int64_t n))

void add_weighted_rows(const WeightedRowsParams& p) {
  check(p.num_tokens >= 0 && p.per_token >= 1 && p.width >= 1, "add_weighted_rows: empty rows");
  BEQUEST_DISPATCH_ISA(add_weighted_rows(p));
}

void make_gates(const float* x, float* out, int64_t n) { BEQUEST_DISPATCH_ISA(make_gates(x, out, n)); }

}  // namespace bequest
