// The best continuations of each group of beams, on the device: the contract of ops/beam_candidates.h.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "device/stream.h"
#include "ops/beam_candidates.h"

namespace bequest::cuda {

inline constexpr int64_t kMaxBeamRows = 1024;  // of a group

// All arrays are in device memory, and what they say is data of the step: a graph of a padded size serves
// every smaller one. Groups with k = 0 and rows behind the last group are skipped; such rows are not bad.
struct BeamCandidateParams {
  const void* logits;  // [R, V], rows `stride` apart
  DType dtype;
  int64_t stride;              // elements
  int64_t vocab_size;          // V
  int64_t num_rows;            // R
  const float* cumulative;     // [R]
  const int32_t* nodes;        // [R] nodes in the group's catalogue; null if no group has one
  const int32_t* group_start;  // [G + 1]; at most kMaxBeamRows rows each
  const BeamGroup* groups;     // [G]
  int64_t num_groups;          // G
  void* workspace;             // beam_workspace_bytes(R, slots) bytes, aligned to 8
  BeamOutput out;
};

// For groups whose rows * k add up to at most num_slots.
int64_t beam_workspace_bytes(int64_t num_rows, int64_t num_slots);

// Two launches. The logits are read once.
void beam_candidates(const BeamCandidateParams& p, Stream stream);

}  // namespace bequest::cuda
