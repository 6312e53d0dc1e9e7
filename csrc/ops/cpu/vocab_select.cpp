#include "ops/cpu/vocab_select.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace bequest {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// The nucleus is searched by value until the bracket holds so few tokens that sorting them is cheap.
constexpr int64_t kSortable = 512;
constexpr int64_t kChunk = 1024;
constexpr int kMaxPasses = 8;  // many equal logits never get fewer

// A lower bound of the k-th largest: the k-th largest of maxima of disjoint sets. With eight sets or more for
// each wanted element, hardly anything but the k best passes it.
float lower_bound_of_kth(const float* x, int64_t n, int64_t k, SelectScratch& scratch) {
  const int64_t set_size = std::min<int64_t>(64, n / (8 * k));
  if (set_size < 2) return -kInfinity;
  scratch.maxima.resize(n / set_size + kMaxScanTail);
  const int64_t count = set_maxima(x, n, set_size, scratch.maxima.data());
  const auto kth = scratch.maxima.begin() + (k - 1);
  std::nth_element(scratch.maxima.begin(), kth, scratch.maxima.begin() + count, std::greater<>());
  return *kth;
}

struct Bracket {
  float lower;  // the cutoff is in [lower, upper)
  float upper;
  double mass_above;  // of x >= upper
  int64_t count;      // of tokens in the bracket
};

// One pass: measures kMassLevels values between the ends and takes the part in which `target` is reached.
Bracket narrow(const float* x, int64_t n, float max, float inverse_temperature, double target,
               Bracket bracket) {
  MassLevels levels;
  const float step = (bracket.upper - bracket.lower) / kMassLevels;
  for (int i = 0; i < kMassLevels; ++i) levels.level[i] = bracket.upper - step * static_cast<float>(i + 1);
  levels.level[kMassLevels - 1] = bracket.lower;
  measure_mass(x, n, max, inverse_temperature, levels);
  Bracket next = bracket;
  int64_t count_upper = 0;
  for (int i = 0; i < kMassLevels; ++i) {
    if (levels.mass[i] >= target || i == kMassLevels - 1) {
      next.lower = levels.level[i];
      next.count = levels.count[i] - count_upper;
      break;
    }
    next.upper = levels.level[i];
    next.mass_above = levels.mass[i];
    count_upper = levels.count[i];
  }
  return next;
}

}  // namespace

void select_top(const float* x, int64_t n, int64_t k, float floor, SelectScratch& scratch) {
  auto& candidates = scratch.candidates;
  k = std::min(k, n);
  const float lower = std::max(floor, lower_bound_of_kth(x, n, k, scratch));
  candidates.clear();
  Candidate found[kChunk];  // few are found: clearing room for all would cost more than finding them
  for (int64_t begin = 0; begin < n; begin += kChunk) {
    const int64_t count = collect(x + begin, std::min(kChunk, n - begin), lower, kInfinity, found);
    for (int64_t i = 0; i < count; ++i)
      candidates.push_back({found[i].value, found[i].id + static_cast<int32_t>(begin)});
  }
  if (static_cast<int64_t>(candidates.size()) <= k) return;
  std::nth_element(candidates.begin(), candidates.begin() + (k - 1), candidates.end(), better);
  candidates.resize(k);
}

void keep_nucleus(std::vector<Candidate>& candidates, float inverse_temperature, float share) {
  std::sort(candidates.begin(), candidates.end(), better);
  const float max = candidates.front().value;
  const auto weight = [&](const Candidate& c) {
    return static_cast<double>(std::exp((c.value - max) * inverse_temperature));
  };
  double total = 0;
  for (const Candidate& c : candidates) total += weight(c);
  double mass = 0;
  size_t kept = 0;
  while (kept < candidates.size() && mass < share * total) mass += weight(candidates[kept++]);
  candidates.resize(std::max<size_t>(kept, 1));
}

Cutoff find_nucleus(const float* x, int64_t n, float max, float inverse_temperature, float share, float floor,
                    SelectScratch& scratch) {
  const double total = sum_exp(x, n, max, inverse_temperature, floor);
  const double target = share * total;
  // Tokens that each weigh less than (1 - share) / n of the total cannot make up 1 - share of it together.
  const double least = std::log((1.0 - share) * total / static_cast<double>(n)) / inverse_temperature;
  const float lower = std::max(floor, static_cast<float>(max + least - 1e-3 / inverse_temperature));
  Bracket bracket{lower, std::nextafter(max, kInfinity), 0.0, n};
  for (int pass = 0; pass < kMaxPasses && bracket.count > kSortable; ++pass)
    bracket = narrow(x, n, max, inverse_temperature, target, bracket);
  auto& candidates = scratch.candidates;
  candidates.resize(n);
  candidates.resize(collect(x, n, bracket.lower, bracket.upper, candidates.data()));
  std::sort(candidates.begin(), candidates.end(), better);
  double mass = bracket.mass_above;
  Cutoff cutoff{max, std::numeric_limits<int32_t>::max()};
  for (const Candidate& c : candidates) {
    cutoff = {c.value, c.id};
    mass += std::exp((c.value - max) * inverse_temperature);
    if (mass >= target) break;
  }
  return cutoff;
}

}  // namespace bequest
