// What happens to a token's fused qkv row between the projection and the attention, in one launch: norms of
// the query and key heads, rotation, and the store of keys and values in the cache.
#pragma once

#include <cstdint>

#include "cache/kv_layout.h"
#include "core/dtype.h"
#include "device/stream.h"

namespace bequest::cuda {

struct QkvParams {
  void* q;  // [T, NQ, D], changed in place; heads are contiguous, tokens q_stride elements apart
  void* k;  // [T, NKV, D], likewise; changed in place only without a cache
  void* v;  // [T, NKV, D]; not read without a cache
  int64_t q_stride;
  int64_t k_stride;
  int64_t v_stride;
  int64_t num_tokens;
  int64_t q_heads;
  int64_t k_heads;
  int64_t head_dim;

  const void* q_weight;  // [D]; both null: heads are not normalised
  const void* k_weight;  // [D]
  float weight_offset;   // added to both, in float32
  float eps;

  const int32_t* positions;   // [T], in [0, P)
  const float* cos_sin;       // [P, R]: cosines of R / 2 angles, then their sines; null: no rotation
  int64_t rotary_dim;         // R: even, at most D; the rest of a head stays as it is
  const float* query_scales;  // [P]: what turned queries are multiplied by at their position, or null

  const int64_t* slots;  // [T], -1: the token is not stored
  void* kv_cache;        // [NB, L, 2, NKV, BS, D], or null
  KvLayout layout;
  int64_t layer;
  DType kv_dtype;    // `dtype`, or fp8: then keys and values are multiplied by these before they are rounded
  float key_factor;  // and what exceeds fp8's largest value becomes it
  float value_factor;

  DType dtype;  // of q, k, v and both weights
};

// REQUIRES: 1 <= D <= 512; slots inside the cache, none twice; positions inside the table (neither can be
// checked here: they are data of the step).
void prepare_qkv(const QkvParams& p, Stream stream);

}  // namespace bequest::cuda
