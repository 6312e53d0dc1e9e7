// Vector passes over one row of logits, the pieces that sampling and log-probabilities are made of.
// All take x [n]; a NaN compares false, so callers reject broken rows by scan_max first.
#pragma once

#include <cstdint>

namespace bequest {

struct Candidate {
  float value;
  int32_t id;
};

// The order of every selection: larger first, equal ones by lower id.
inline bool better(const Candidate& a, const Candidate& b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}

struct RowMax {
  float max;
  bool finite;  // no NaN, no +inf, and not everything -inf: the row has a softmax
};

RowMax scan_max(const float* x, int64_t n);

// The lowest index with x == value. REQUIRES: there is one.
int32_t find_first(const float* x, int64_t n, float value);

// Σ exp((x - max) * inverse_temperature) over x >= floor. REQUIRES: max is the row's.
double sum_exp(const float* x, int64_t n, float max, float inverse_temperature, float floor);

// Number of x > value.
int64_t count_greater(const float* x, int64_t n, float value);

// Maxima of disjoint sets of `set_size` elements (the last sets may have fewer) that cover x. Returns their
// number, at most n / set_size + kMaxScanTail.
inline constexpr int64_t kMaxScanTail = 64;
int64_t set_maxima(const float* x, int64_t n, int64_t set_size, float* maxima);

// Elements with lower <= x < upper, in order of id. REQUIRES: room for all of them in `out`.
int64_t collect(const float* x, int64_t n, float lower, float upper, Candidate* out);

// For each of kMassLevels descending levels: Σ exp((x - max) * inverse_temperature) over x >= level, and
// their number.
inline constexpr int kMassLevels = 8;
struct MassLevels {
  float level[kMassLevels];
  double mass[kMassLevels];
  int64_t count[kMassLevels];
};
void measure_mass(const float* x, int64_t n, float max, float inverse_temperature, MassLevels& levels);

}  // namespace bequest
