#include "ops/cpu/feed_forward.h"

#include "core/check.h"
#include "ops/cpu/linear_amx.h"

namespace bequest {

void feed_forward(const FeedForwardParams& p) {
  check(p.num_tokens >= 0 && p.in_features >= 1 && p.inner_features >= 1 && p.out_features >= 1,
        "feed_forward: empty weight");
  check(!p.gated || p.inner_features % kStripWidth == 0, "feed_forward: cannot gate this weight");
  if (p.num_tokens > 0) feed_forward_amx(p);
}

}  // namespace bequest
