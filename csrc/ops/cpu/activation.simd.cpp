#include "core/threads.h"
#include "ops/cpu/activation_functions.h"

namespace bequest::BEQUEST_ISA {

void gated_activation(const GatedParams& p) {
  with_activation(p.activation, [&]<class F>() {
    parallel_for(p.num_tokens, 1 + 8192 / p.intermediate, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const float* gate = p.gate_up + t * 2 * p.intermediate;
        gate_row<F>(gate, gate + p.intermediate, p.out + t * p.intermediate, p.intermediate);
      }
    });
  });
}

void activate(float* x, int64_t count, Activation activation) {
  with_activation(activation, [&]<class F>() {
    // Whole vectors but for the last one: each element has the same bits wherever it lies.
    const int64_t vectors = (count + kLanes - 1) / kLanes;
    parallel_for(vectors, 1 + 8192 / kLanes, [&](int64_t begin, int64_t end) {
      const int64_t last = end * kLanes < count ? end * kLanes : count;
      apply_row<F>(x + begin * kLanes, last - begin * kLanes);
    });
  });
}

}  // namespace bequest::BEQUEST_ISA
