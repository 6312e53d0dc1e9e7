// The kernels of the gated delta rule for heads of 128 keys and 128 values behind a convolution of four
// tokens.
#pragma once

#include "device/stream.h"
#include "ops/cuda/delta_net.h"

namespace bequest::cuda::delta {

// Whether they take these sizes.
bool fits(const DeltaNetSizes& sizes);

// REQUIRES: fits; no sequence has more than one token
void delta_step(const DeltaNetParams& p, Stream stream);

// Any number of tokens. REQUIRES: fits; p.scratch
void delta_scan(const DeltaNetParams& p, Stream stream);

}  // namespace bequest::cuda::delta
