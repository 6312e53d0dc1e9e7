// Attention of all patches of an image to all of them. Keys and values come with the queries, so there is no
// cache.
#pragma once

#include <cstdint>

#include "device/stream.h"

namespace bequest::cuda {

struct ImageAttentionParams {
  const void* qkv;  // [N, 3, NH, D] bf16: queries, keys and values
  void* out;        // [N, NH, D] bf16
  int64_t num_patches;
  int64_t num_heads;
  int64_t head_dim;
  float scale;
};

// Whether there is a kernel for heads of this size, on the current device.
bool can_attend_image(int64_t head_dim);

// REQUIRES: can_attend_image(D); pointers are aligned to 16.
void attend_image(const ImageAttentionParams& p, Stream stream);

}  // namespace bequest::cuda
