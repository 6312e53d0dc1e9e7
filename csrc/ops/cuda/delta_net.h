// The gated delta rule over a short causal convolution, on the device: ops/delta_net.h says what it computes.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "device/stream.h"
#include "ops/delta_net.h"

namespace bequest::cuda {

struct DeltaNetParams {
  DeltaNetSizes sizes;
  const void* rows;    // [T, C + HV DV + 2 HV]: queries, keys, values; z; b (of the rate), a (of the decay)
  const float* taps;   // [CW, C], the token's own last
  const float* decay;  // [HV]
  const float* step_bias;  // [HV]
  const float* norm;       // [DV]
  float eps;
  void* out;                   // [T, HV DV]
  DType dtype;                 // of rows and out
  float* states;               // of this layer, of slot 0
  int64_t slot_stride;         // floats from one slot to the next
  const int32_t* query_start;  // [S + 1]
  const int32_t* starts;       // [S] the slot that a sequence goes on from; -1: it begins
  const int32_t* slots;        // [T] the slot that gets the state behind a token; -1: nobody wants it
  int64_t num_sequences;       // S; those without tokens are padding
  int64_t num_tokens;          // T; those behind the last one of a sequence are padding, and get zeros
  bool one_each;               // no sequence has more than one token
  float* scratch;              // [delta_net_scratch], or null where that is none
};

// Floats that a step needs beside its results.
int64_t delta_net_scratch(const DeltaNetSizes& sizes, int64_t num_tokens, bool one_each);

// REQUIRES: DK and DV are at most 1024; no slot is both read and written, and none is written twice; slots
// are inside the table (they are data of the step, and cannot be checked here). For other sizes than
// those of delta_net_kernels.h the last token of a sequence has a slot: its matrices are worked on there.
void delta_net(const DeltaNetParams& p, Stream stream);

struct SigmoidGateParams {
  void* x;           // [count], in place
  const void* gate;  // [count]
  DType dtype;
  int64_t count;
};

// x times the logistic function of the gate.
void sigmoid_gate(const SigmoidGateParams& p, Stream stream);

}  // namespace bequest::cuda
