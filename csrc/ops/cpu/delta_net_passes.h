// What the passes of delta_net hand on to each other.
#pragma once

#include "ops/cpu/delta_net.h"

namespace bequest {

struct DeltaNetScratch {
  float* convolved;  // [T, C]: queries, keys and values, as the recurrence takes them
  float* gates;      // [T, 2, HV]: decays, rates
};

}  // namespace bequest
