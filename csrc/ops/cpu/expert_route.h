// Which experts each token goes to, and what each of them counts there.
//
// A score is the softmax of a token's logits, or the sigmoid of each. With groups, experts of the best groups
// alone can be chosen. A token takes the experts of the best scores, by rank; of two that are equal the
// smaller number comes first, and NaN is worse than everything else. A row's bits depend on its logits alone.
#pragma once

#include <cstdint>

namespace bequest {

enum class Scoring : int { kSoftmax = 0, kSigmoid = 1 };

struct RoutingRule {
  int64_t top_k;
  Scoring scoring;
  const float* bias;   // [E] on scores while experts are chosen, or null; what they count is without it
  int64_t num_groups;  // of E / num_groups experts that follow each other
  int64_t top_groups;
  int64_t group_best;  // so many of a group's best scores, with the bias, add up to the group's
  bool renormalises;   // what a token's experts count is divided by its sum
  float factor;        // of what they count, at last
};

struct RouteParams {
  const float* logits;  // [T, E], contiguous
  int64_t num_tokens;
  int64_t num_experts;
  RoutingRule rule;
  int32_t* ids;    // [T, top_k], best first
  float* weights;  // [T, top_k]
};

// REQUIRES: num_groups divides E, group_best is 1 or 2 and fits a group, and the top groups have top_k
// experts.
void route(const RouteParams& p);

}  // namespace bequest
