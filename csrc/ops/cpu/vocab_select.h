// Selection in a row of logits without sorting it. Order: larger first, equal ones by lower id.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/cpu/sampling_draw.h"
#include "ops/cpu/vocab_scan.h"

namespace bequest {

// Reused from call to call, by one thread at a time.
struct SelectScratch {
  std::vector<float> maxima;
  std::vector<Candidate> candidates;
};

// Leaves the k best of x [n] among x >= floor (all of them if there are fewer) in scratch.candidates, in no
// particular order. REQUIRES: no NaN in x.
void select_top(const float* x, int64_t n, int64_t k, float floor, SelectScratch& scratch);

// Cuts `candidates` to the smallest set of best ones that has at least `share` of their softmax. At least one
// stays.
void keep_nucleus(std::vector<Candidate>& candidates, float inverse_temperature, float share);

// Where the same set ends in a whole row, among x >= floor. REQUIRES: no NaN in x, max is the row's.
Cutoff find_nucleus(const float* x, int64_t n, float max, float inverse_temperature, float share, float floor,
                    SelectScratch& scratch);

}  // namespace bequest
