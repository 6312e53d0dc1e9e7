// out = x · weightᵀ + bias over codes of a quantised file (ops/cpu/quantised.h), with the bits that float32
// weights of the same values would give.
#pragma once

#include "core/isa.h"
#include "ops/cpu/linear.h"

namespace bequest {

// REQUIRES: a format of codes, 32 divides K, T >= 1; otherwise as linear().
void linear_quantised(const LinearParams& p);

// Rows × panels that one thread multiplies; of a gated product the panels of the gate, and as many of the
// other half.
struct QuantisedItem {
  int64_t row_begin, row_end;
  int64_t panel_begin, panel_end;
};

// How work is cut for this number of rows.
struct QuantisedCut {
  int64_t rows;           // per item
  int64_t panels;         // a multiple of this per item
  int64_t scratch_bytes;  // per thread
};

BEQUEST_DECLARE_PER_ISA(QuantisedCut quantised_cut(const LinearParams& p))
BEQUEST_DECLARE_PER_ISA(void multiply_quantised(const LinearParams& p, const QuantisedItem& item,
                                                float* scratch))

}  // namespace bequest
