#include "ops/cpu/norm.h"

#include "core/isa.h"

namespace bequest {

BEQUEST_DECLARE_PER_ISA(void rms_norm(const RmsNormParams& p))
BEQUEST_DECLARE_PER_ISA(void layer_norm(const LayerNormParams& p))
BEQUEST_DECLARE_PER_ISA(void head_rms_norm(const HeadRmsNormParams& p))

void rms_norm(const RmsNormParams& p) {
  check(p.num_tokens >= 0 && p.hidden >= 1, "rms_norm: empty rows");
  check(p.num_tokens == 0 || p.out != p.residual, "rms_norm: the result would overwrite the residual");
  check(in_range(p.tap), "rms_norm: tap out of range");
  BEQUEST_DISPATCH_ISA(rms_norm(p));
}

void layer_norm(const LayerNormParams& p) {
  check(p.num_tokens >= 0 && p.hidden >= 1, "layer_norm: empty rows");
  check(p.num_tokens == 0 || p.out != p.residual, "layer_norm: the result would overwrite the residual");
  check(in_range(p.tap), "layer_norm: tap out of range");
  BEQUEST_DISPATCH_ISA(layer_norm(p));
}

void head_rms_norm(const HeadRmsNormParams& p) {
  check(p.num_tokens >= 0 && p.num_heads >= 0 && p.head_dim >= 1, "head_rms_norm: empty heads");
  check(p.num_tokens <= 1 || p.row_stride >= p.num_heads * p.head_dim, "head_rms_norm: rows overlap");
  BEQUEST_DISPATCH_ISA(head_rms_norm(p));
}

}  // namespace bequest
