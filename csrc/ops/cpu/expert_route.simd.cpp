#include "ops/cpu/expert_route.h"
#include "core/simd.h"

namespace bequest::BEQUEST_ISA {
namespace {

// exp takes NaN for a number.
VecF exp_or_nan(VecF x) { return x == x ? exp(x) : x; }

// out [n] = f(x), a whole vector at a time: each element has the same bits wherever it lies.
template <class F>
void make_scores(const float* x, float* out, int64_t n, F f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, f(load(x + i)));
  if (i == n) return;
  float last[kLanes] = {};
  const size_t bytes = (n - i) * sizeof(float);
  std::memcpy(last, x + i, bytes);
  store(last, f(load(last)));
  std::memcpy(out + i, last, bytes);
}

}  // namespace

void score_experts(const float* logits, float* scores, int64_t num_experts, bool sigmoid) {
  if (sigmoid)
    return make_scores(logits, scores, num_experts, [](VecF x) { return 1.0f / (exp_or_nan(-x) + 1.0f); });
  float most = logits[0];
  for (int64_t i = 1; i < num_experts; ++i) most = logits[i] > most ? logits[i] : most;
  make_scores(logits, scores, num_experts, [most](VecF x) { return exp_or_nan(x - most); });
  float sum = 0.0f;
  for (int64_t i = 0; i < num_experts; ++i) sum += scores[i];
  make_scores(scores, scores, num_experts, [sum](VecF x) { return x / sum; });
}

}  // namespace bequest::BEQUEST_ISA
