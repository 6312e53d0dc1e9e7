// Pixels of one size → of another, to the bit as Pillow's `resize` of 8-bit RGB: a pass over columns, then
// one over rows, each with weights of 22 bits and rounded to 8 bits. One thread: it runs beside the steps, in
// the thread of whoever prepares an image.
#pragma once

#include <cstdint>

namespace bequest {

enum class ResizeFilter {
  kLanczos = 1,
  kBilinear = 2,
  kBicubic = 3,
  kBox = 4,
  kHamming = 5
};  // Pillow's numbers

struct ResizeParams {
  const uint8_t* in;  // [height, width, 3]
  uint8_t* out;       // [out_height, out_width, 3]
  int64_t height, width;
  int64_t out_height, out_width;
  ResizeFilter filter;
};

// REQUIRES: no size is 0
void resize(const ResizeParams& p);

// What each of `count` places is made of: weights[i, k] of place first[i] + k, for k < num[i].
struct ResizeTaps {
  const int32_t* weights;  // [count, stride]
  const int32_t* first;    // [count]
  const int32_t* num;      // [count]
  int64_t count, stride;
};

// One pass. Of columns: [rows, in_size, 3] → [rows, count, 3]; of rows: [in_size, columns] → [count,
// columns].
struct ResizePass {
  const uint8_t* in;
  uint8_t* out;
  int64_t across;   // rows of a pass over columns, columns (with channels) of a pass over rows
  int64_t in_size;  // pixels that places count in
  ResizeTaps taps;
  uint8_t* scratch;  // of a pass over columns: [(in_size + count) * 3, 16]
};

}  // namespace bequest
