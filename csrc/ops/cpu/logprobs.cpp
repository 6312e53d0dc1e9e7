#include "ops/cpu/logprobs.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/check.h"
#include "core/threads.h"
#include "ops/cpu/vocab_select.h"

namespace bequest {
namespace {

void fill_broken(const LogprobParams& p, int64_t i) {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  p.chosen_logprob[i] = nan;
  p.rank[i] = 1;
  std::fill_n(p.top_ids + i * p.top, p.top, 0);
  std::fill_n(p.top_logprob + i * p.top, p.top, nan);
}

void logprobs_of_row(const LogprobParams& p, int64_t i, SelectScratch& scratch) {
  const float* x = p.logits + i * p.stride;
  const int64_t n = p.vocab_size;
  const RowMax found = scan_max(x, n);
  if (!found.finite) return fill_broken(p, i);
  constexpr float everything = -std::numeric_limits<float>::infinity();
  const double log_sum = found.max + std::log(sum_exp(x, n, found.max, 1.0f, everything));
  const float value = x[p.chosen[i]];
  p.chosen_logprob[i] = static_cast<float>(value - log_sum);
  p.rank[i] = static_cast<int32_t>(1 + count_greater(x, n, value));
  if (p.top == 0) return;
  select_top(x, n, p.top, everything, scratch);
  std::sort(scratch.candidates.begin(), scratch.candidates.end(), better);
  for (int64_t k = 0; k < p.top; ++k) {
    p.top_ids[i * p.top + k] = scratch.candidates[k].id;
    p.top_logprob[i * p.top + k] = static_cast<float>(scratch.candidates[k].value - log_sum);
  }
}

}  // namespace

void logprobs(const LogprobParams& p) {
  check(p.top >= 0 && p.top <= p.vocab_size, "logprobs: more alternatives than tokens");
  for (int64_t i = 0; i < p.num; ++i)
    check(p.chosen[i] >= 0 && p.chosen[i] < p.vocab_size, "logprobs: chosen token outside the vocabulary");
  std::vector<SelectScratch> scratch(num_threads());
  for_each_item(p.num, [&](int64_t i, int worker) { logprobs_of_row(p, i, scratch[worker]); });
}

}  // namespace bequest
