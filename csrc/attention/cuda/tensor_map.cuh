// The cache, the queries and the results as the copy engine sees them.
#pragma once

#include <cuda.h>

#include "attention/cuda/attention.h"

namespace bequest::cuda {

// Rows of queries that a multiplying warpgroup has.
inline constexpr int kQueryBoxRows = 64;
// Whether they are whole tokens of `group` heads, which the copy engine brings in one box.
constexpr bool has_query_boxes(int group) { return kQueryBoxRows % group == 0; }

struct PrefillMaps {
  // Keys and values of one layer as a tensor [NB, 2 * NKV * BS, D], in boxes of the rows of one block (64 at
  // most). bf16: by 64 columns, which arrive in shared memory as rows of panels (device/warpgroup.cuh); fp8:
  // by all columns, which arrive as they lie.
  CUtensorMap cache;
  // Queries as a tensor [T, NQ, D], in boxes of the rows of a warpgroup by 64 columns: the heads of a group,
  // token by token. Only where has_query_boxes().
  CUtensorMap queries;
  CUtensorMap results;  // the output likewise, only over an fp8 cache
};

// `keys`: of the layer's head 0 in block 0, 16-byte aligned. Throws if the driver refuses.
PrefillMaps prefill_maps(const CudaAttentionParams& p, const void* keys);

}  // namespace bequest::cuda
