#include "ops/cpu/rope.h"

#include <string>

#include "core/isa.h"

namespace bequest {

BEQUEST_DECLARE_PER_ISA(void rotary(const RotaryParams& p))

void rotary(const RotaryParams& p) {
  check(p.rotary_dim >= 0 && p.rotary_dim % 2 == 0 && p.rotary_dim <= p.head_dim,
        "rotary: the rotated part must be even and within the head");
  for (int64_t t = 0; t < p.num_tokens; ++t) {
    if (p.positions[t] < 0 || p.positions[t] >= p.num_positions) [[unlikely]]
      fail("rotary: position " + std::to_string(p.positions[t]) + " is outside the table of " +
           std::to_string(p.num_positions));
  }
  BEQUEST_DISPATCH_ISA(rotary(p));
}

}  // namespace bequest
