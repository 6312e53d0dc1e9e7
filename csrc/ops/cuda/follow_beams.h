// The beams of a step that was launched before the host knew them: they continue the best candidates of the
// step before, which is on the device. What the host staged for the step is completed in place.
#pragma once

#include <cstdint>

#include "device/stream.h"
#include "ops/beam_candidates.h"

namespace bequest::cuda {

inline constexpr int32_t kMostEndsFollowed = 16;

// A group whose beams follow. A plain record in device memory.
struct BeamFollower {
  int32_t group;        // of this step
  int32_t before;       // of the step before
  int32_t first_row;    // of its beams among those of this step
  int32_t num_rows;     // of them, at most kMaxBeamRows
  int32_t row_before;   // of its first beam in the step before
  int32_t first_token;  // of its beams among the tokens of this step
  int32_t first_copy;   // of its beams among the copies
  int32_t num_copies;   // a multiple of num_rows
  int32_t num_ends;
  int32_t ends[kMostEndsFollowed];  // tokens that no beam goes on behind
};
static_assert(sizeof(BeamFollower) == 100);

// All arrays are in device memory.
struct FollowBeamsParams {
  BeamOutput before;              // of the step before; `bad` is not read
  const int32_t* nodes_before;    // [R of that step]; null: no group had a catalogue
  const BeamGroup* groups;        // [G] of this step
  const BeamFollower* followers;  // [F]
  int64_t num_followers;          // F
  float* scores;                  // [R] of this step: those of the followers' beams are written
  int32_t* nodes;                 // [R] likewise; null: no group has a catalogue
  int32_t* input_ids;             // [T] likewise
  int32_t* copies;                // [C, 2] (source, destination): sources become those of the parents
};

// Beam i of a follower continues the i-th best candidate of its group that is no end token. Beams that there
// are too few candidates for get token 0, score -inf and node 0. The source of copy j of beam i becomes that
// of copy j of its parent.
void follow_beams(const FollowBeamsParams& p, Stream stream);

}  // namespace bequest::cuda
