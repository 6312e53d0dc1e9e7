// The best continuations of each group of beams.
//
// A row's log-probabilities are the log-softmax of its logits; then masks and biases, which renormalise
// nothing; then the row's cumulative score is added. Of all rows of a group the k best are returned, best
// first: equal scores by row, in a row by larger edited logit, then by lower token. Masked tokens are never
// returned, so that there may be fewer than k.
//
// A group's result depends on its own rows and constraints alone, bit for bit.
#pragma once

#include <cstdint>

#include "ops/catalogue.h"

namespace bequest {

inline constexpr int32_t kMaxBeamCandidates = 4096;

// What the rows of one group have in common. A plain record: pointers are to host memory on the CPU, to
// device memory in a record that itself lies on the device.
struct BeamGroup {
  CatalogueRule rule;                  // applied at each row's node
  const uint32_t* allowed = nullptr;   // bits [V]: nothing else may follow; null: everything
  const int32_t* edit_ids = nullptr;   // [num_edits] ascending and distinct, in [0, V)
  const float* edit_values = nullptr;  // [num_edits] added to the logit; -inf forbids the token
  int64_t first_slot = 0;  // of the group's rows * k slots in the workspace; only the device reads it
  int32_t num_edits = 0;
  int32_t k = 0;  // <= kMaxBeamCandidates; 0: the group is skipped
};
static_assert(sizeof(BeamGroup) == 88);

// Behind the last candidate of a group: token and row -1, score and logprob -inf.
struct BeamOutput {
  float* score;     // [G, K] cumulative score with the candidate
  int32_t* row;     // [G, K] counted from the group's first row
  int32_t* token;   // [G, K]
  float* logprob;   // [G, K] log-softmax of the raw logits, before masks and bias
  bool* bad;        // [R]: NaN or +inf in the logits, nothing but -inf, or a NaN score; the row gives nothing
  int64_t columns;  // K >= every k
};

}  // namespace bequest
