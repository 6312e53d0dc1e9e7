// Experts with adapters: what adapters add to the products of single experts.
#pragma once

#include <cstdint>

#include "model/cpu/adapters.h"
#include "ops/cpu/experts.h"

namespace bequest {

// experts() of ops/cpu/experts.h. Tokens whose adapter changes an expert of the layer pass their experts
// apart from the others, and nothing is fused there. So a token's bits depend on the token and its own
// adapter alone. Returns how many experts were read.
int64_t experts_with_adapters(const ExpertsParams& p, const StepAdapters& adapters);

}  // namespace bequest
