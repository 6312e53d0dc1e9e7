// Stores the keys and values of a step's tokens in the cache.
#pragma once

#include <cstdint>

#include "cache/kv_layout.h"
#include "core/dtype.h"

namespace bequest {

struct KvWriteParams {
  const float* k;    // [T, NKV, D], rows k_stride apart
  const float* v;    // [T, NKV, D], rows v_stride apart
  int64_t k_stride;  // elements; views of a fused qkv row are welcome
  int64_t v_stride;
  const int64_t* slots;  // [T], -1: the token is not stored
  int64_t num_tokens;
  void* kv_cache;  // [NB, L, 2, NKV, BS, D]
  DType kv_dtype;
  KvLayout layout;
  int64_t layer;
  // What keys and values are multiplied by before they are rounded to fp8, where what exceeds its largest
  // value becomes it.
  float key_factor = 1.0f;
  float value_factor = 1.0f;
};

// Throws if the layer or one of `count` slots is neither -1 nor in the cache.
void check_kv_places(const int64_t* slots, int64_t count, const KvLayout& layout, int64_t layer);

// Throws before anything is written if a slot is neither -1 nor in [0, NB * BS).
// REQUIRES: no slot twice.
void write_kv(const KvWriteParams& p);

}  // namespace bequest
