// The attention of a step's only token, from its projected row to the result, in one launch.
#pragma once

#include "attention/cuda/attention.h"
#include "ops/cuda/rope.h"

namespace bequest {

// Of a multiprocessor's shared memory, at most, with heads of up to 128.
inline constexpr int kSingleTokenBytes = 84 * 1024;

// Whether attend_token serves this device and shape.
bool can_attend_token(const WorkShape& shape);

// prepare_qkv and cuda_paged_attention of a step with one token, or none; `heads` and `p` are what these take
// (of p neither q nor states and tickets are used, and of the list only whether there is work). Queries stay
// as they were projected.
// REQUIRES: can_attend_token; the token's position is its place in its sequence; max_blocks entries from the
// begin of its block table on can be read, whoever they belong to. Captured in a graph: the graph holds no
// other writer of this layer's keys and values.
void attend_token(const CudaAttentionParams& p, const cuda::QkvParams& heads, Stream stream);

}  // namespace bequest
