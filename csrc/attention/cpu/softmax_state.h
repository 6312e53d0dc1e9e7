// The unfinished softmax-weighted mean of a set of values, as a value {o, m, d}:
//
//   m = max s_i        d = Σ exp(s_i − m)        o = Σ exp(s_i − m) v_i        result = o / d
//
// States of disjoint sets merge into the state of their union, so a sequence's keys may be cut anywhere:
// split KV, shared prefixes and the tiles of one pass are all merges. {0, −inf, 0} is the empty set, and
// merging with it changes no bit of the other state.
#pragma once

#include <cmath>

namespace bequest {

// What a merge multiplies the two sides' o and d with, and the merged m.
struct MergeFactors {
  float m;
  float first;
  float second;
};

// Internal linkage: a file compiled for a wide instruction set keeps its own copy.
static inline MergeFactors merge_factors(float m_first, float m_second) {
  const float m = m_second > m_first ? m_second : m_first;
  // Two empty states: exp(−inf − −inf) would be NaN.
  if (m == -INFINITY) return {m, 1.0f, 1.0f};
  return {m, expf(m_first - m), expf(m_second - m)};
}

}  // namespace bequest
