// x times the logistic function of another row: how an attention's output is gated.
#pragma once

#include <cstdint>

namespace bequest {

struct SigmoidGateParams {
  float* x;           // [count], in place
  const float* gate;  // [count]
  int64_t count;
};

void sigmoid_gate(const SigmoidGateParams& p);

}  // namespace bequest
