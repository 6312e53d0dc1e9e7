#include "ops/cpu/norm.h"

#include "core/isa.h"

namespace bequest {

BEQUEST_DECLARE_PER_ISA(void rms_norm(const RmsNormParams& p))
BEQUEST_DECLARE_PER_ISA(void layer_norm(const LayerNormParams& p))
BEQUEST_DECLARE_PER_ISA(void head_rms_norm(const HeadRmsNormParams& p))

namespace {

template <class Params>
void check_rows(const Params& p) {
  check(p.num_tokens >= 0 && p.hidden >= 1, "norm: empty rows");
  check(p.num_tokens == 0 || p.out != p.residual, "norm: the result would overwrite the residual");
  check(in_range(p.tap), "norm: tap out of range");
}

}  // namespace

void rms_norm(const RmsNormParams& p) {
  check_rows(p);
  BEQUEST_DISPATCH_ISA(rms_norm(p));
}

void layer_norm(const LayerNormParams& p) {
  check_rows(p);
  BEQUEST_DISPATCH_ISA(layer_norm(p));
}

void head_rms_norm(const HeadRmsNormParams& p) {
  check(p.num_tokens >= 0 && p.num_heads >= 0 && p.head_dim >= 1, "head_rms_norm: empty heads");
  check(p.num_tokens <= 1 || p.row_stride >= p.num_heads * p.head_dim, "head_rms_norm: rows overlap");
  BEQUEST_DISPATCH_ISA(head_rms_norm(p));
}

}  // namespace bequest
