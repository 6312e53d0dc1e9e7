#include "ops/cpu/sigmoid_gate.h"

#include "core/threads.h"
#include "ops/cpu/activation_functions.h"

namespace bequest::BEQUEST_ISA {
namespace {

struct Sigmoid : UpItself {
  static VecF apply(VecF x) { return 1.0f / (exp(-x) + 1.0f); }
};

}  // namespace

void sigmoid_gate(const SigmoidGateParams& p) {
  parallel_for(p.count, 8192, [&](int64_t begin, int64_t end) {
    gate_row<Sigmoid>(p.gate + begin, p.x + begin, p.x + begin, end - begin);
  });
}

}  // namespace bequest::BEQUEST_ISA
