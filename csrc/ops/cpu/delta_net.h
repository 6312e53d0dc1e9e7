// The gated delta rule over a short causal convolution: ops/delta_net.h says what it computes.
#pragma once

#include <cstdint>

#include "ops/delta_net.h"

namespace bequest {

struct DeltaNetParams {
  DeltaNetSizes sizes;
  const float* rows;   // [T, C + HV DV + 2 HV]: queries, keys, values; z; b (of the rate), a (of the decay)
  const float* taps;   // [CW, C], the token's own last
  const float* decay;  // [HV]: -e^A
  const float* step_bias;  // [HV]: on a
  const float* norm;       // [DV]
  float eps;
  float* out;                  // [T, HV DV]
  float* states;               // of this layer, of slot 0
  int64_t slot_stride;         // floats from one slot to the next
  int64_t num_slots;           // NS
  const int32_t* query_start;  // [S + 1]
  const int32_t* starts;       // [S] the slot that a sequence goes on from; -1: it begins
  const int32_t* slots;        // [T] the slot that gets the state behind a token; -1: nobody wants it
  int64_t num_tokens;          // T
  int64_t num_sequences;       // S
};

// REQUIRES: the last token of a sequence has a slot. That may be the one that the sequence goes on from; else
// no slot is both read and written, and none is written twice.
// Throws on a slot outside the table, before anything is written.
void delta_net(const DeltaNetParams& p);

}  // namespace bequest
