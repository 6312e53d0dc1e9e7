#include "ops/cpu/hidden_tap.h"

#include <algorithm>

#include "core/check.h"

namespace bequest {

void tap_rows(const float* x, int64_t num_tokens, int64_t hidden, const HiddenTap& tap) {
  check(num_tokens >= 0 && hidden >= 1, "tap: empty rows");
  check(in_range(tap), "tap: out of range");
  for (int64_t t = 0; t < num_tokens; ++t)
    if (float* const to = tap_row(tap, t, hidden)) std::copy_n(x + t * hidden, hidden, to);
}

}  // namespace bequest
