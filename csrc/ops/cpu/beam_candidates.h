// The best continuations of each group of beams, on the CPU: the contract of ops/beam_candidates.h.
#pragma once

#include <cstdint>

#include "ops/beam_candidates.h"

namespace bequest {

struct BeamCandidateParams {
  const float* logits;         // [R, V], rows `stride` apart
  int64_t stride;              // elements
  int64_t vocab_size;          // V
  const float* cumulative;     // [R]
  const int32_t* nodes;        // [R] nodes in the group's catalogue; null if no group has one
  const int32_t* group_start;  // [G + 1]: the rows of group g are [group_start[g], group_start[g + 1])
  const BeamGroup* groups;     // [G]
  int64_t num_groups;          // G
  BeamOutput out;
};

void beam_candidates(const BeamCandidateParams& p);

}  // namespace bequest
