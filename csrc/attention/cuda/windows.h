// Attention within windows of an image: patches of a window see each other, and nothing else. Keys and values
// come with the queries, so there is no cache.
#pragma once

#include <cstdint>

#include "device/stream.h"

namespace bequest::cuda {

inline constexpr int64_t kWindowPatches = 64;  // that a window has at the most
inline constexpr int64_t kWindowHeadDim = 80;

struct WindowParams {
  const void* qkv;       // [N, 3, NH, D] bf16: queries, keys and values
  const int32_t* begin;  // [W + 1], ascending: window i has patches [begin[i], begin[i + 1])
  const float* cos_sin;  // [N, D]: cosines of D / 2 angles, then their sines; queries and keys turn by them
  void* out;             // [N, NH, D] bf16
  int64_t num_windows;
  int64_t num_heads;
  float scale;
};

// REQUIRES: D is kWindowHeadDim; no window has more than kWindowPatches patches; pointers are aligned to 16.
void attend_windows(const WindowParams& p, Stream stream);

}  // namespace bequest::cuda
