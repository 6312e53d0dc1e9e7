#include "ops/cpu/expert_route.h"

#include <limits>
#include <vector>

#include "core/isa.h"
#include "core/threads.h"

namespace bequest {

BEQUEST_DECLARE_PER_ISA(void score_experts(const float* logits, float* scores, int64_t num_experts,
                                           bool sigmoid))

namespace {

constexpr float kWorst = -std::numeric_limits<float>::infinity();

void score_experts(const float* logits, float* scores, int64_t num_experts, bool sigmoid) {
  BEQUEST_DISPATCH_ISA(score_experts(logits, scores, num_experts, sigmoid));
}

// The best of values [0, count) that are not taken, the first of those that are equal.
int64_t best_of(const float* values, const uint8_t* taken, int64_t count) {
  int64_t best = -1;
  for (int64_t i = 0; i < count; ++i)
    if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
  return best;
}

// Chooses for one token after another, in memory of its own.
class Router {
 public:
  explicit Router(const RouteParams& p)
      : p_(p),
        scores_(static_cast<size_t>(p.num_experts)),
        ranked_(scores_.size()),
        of_groups_(static_cast<size_t>(p.rule.num_groups)),
        taken_(scores_.size()),
        taken_groups_(of_groups_.size()) {}

  void route(int64_t token) {
    score_experts(p_.logits + token * p_.num_experts, scores_.data(), p_.num_experts,
                  p_.rule.scoring == Scoring::kSigmoid);
    rank();
    if (p_.rule.top_groups < p_.rule.num_groups) keep_best_groups();
    choose(p_.ids + token * p_.rule.top_k, p_.weights + token * p_.rule.top_k);
  }

 private:
  void rank() {
    for (size_t i = 0; i < scores_.size(); ++i) {
      const float value = p_.rule.bias == nullptr ? scores_[i] : scores_[i] + p_.rule.bias[i];
      ranked_[i] = value == value ? value : kWorst;
    }
  }

  void keep_best_groups() {
    const int64_t size = p_.num_experts / p_.rule.num_groups;
    for (size_t group = 0; group < of_groups_.size(); ++group)
      of_groups_[group] = score_of(ranked_.data() + static_cast<int64_t>(group) * size, size);
    taken_groups_.assign(taken_groups_.size(), 0);
    for (int64_t i = 0; i < p_.rule.top_groups; ++i)
      taken_groups_[static_cast<size_t>(
          best_of(of_groups_.data(), taken_groups_.data(), p_.rule.num_groups))] = 1;
    for (int64_t i = 0; i < p_.num_experts; ++i)
      if (!taken_groups_[static_cast<size_t>(i / size)]) ranked_[static_cast<size_t>(i)] = kWorst;
  }

  // The best of a group, or the sum of its two best.
  float score_of(const float* values, int64_t count) const {
    float first = kWorst, second = kWorst;
    for (int64_t i = 0; i < count; ++i) {
      if (values[i] > first) {
        second = first;
        first = values[i];
      } else if (values[i] > second) {
        second = values[i];
      }
    }
    return p_.rule.group_best == 2 ? first + second : first;
  }

  void choose(int32_t* ids, float* weights) {
    taken_.assign(taken_.size(), 0);
    float sum = 0.0f;
    for (int64_t k = 0; k < p_.rule.top_k; ++k) {
      const int64_t best = best_of(ranked_.data(), taken_.data(), p_.num_experts);
      taken_[static_cast<size_t>(best)] = 1;
      ids[k] = static_cast<int32_t>(best);
      weights[k] = scores_[static_cast<size_t>(best)];
      sum += weights[k];
    }
    // Sigmoids can be so small that their sum is zero.
    const float divisor = p_.rule.renormalises ? sum + 1e-20f : 1.0f;
    for (int64_t k = 0; k < p_.rule.top_k; ++k) weights[k] = weights[k] / divisor * p_.rule.factor;
  }

  const RouteParams& p_;
  std::vector<float> scores_, ranked_, of_groups_;
  std::vector<uint8_t> taken_, taken_groups_;
};

}  // namespace

void route(const RouteParams& p) {
  const RoutingRule& rule = p.rule;
  check(p.num_tokens >= 0 && p.num_experts >= 1 && rule.num_groups >= 1, "route: no experts");
  check(p.num_experts % rule.num_groups == 0, "route: groups of different sizes");
  const int64_t size = p.num_experts / rule.num_groups;
  check(rule.top_groups >= 1 && rule.top_groups <= rule.num_groups, "route: more groups than there are");
  check((rule.group_best == 1 || rule.group_best == 2) && rule.group_best <= size, "route: groups too small");
  check(rule.top_k >= 1 && rule.top_k <= size * rule.top_groups, "route: more experts than there are");
  parallel_for(p.num_tokens, 32, [&](int64_t begin, int64_t end) {
    Router router(p);
    for (int64_t token = begin; token < end; ++token) router.route(token);
  });
}

}  // namespace bequest
