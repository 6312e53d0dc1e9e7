// Pixels of one size → of another, to the bit as Pillow's `resize` of 8-bit RGB: a pass over columns, then
// one over rows, each with weights of 22 bits and rounded to 8 bits. It runs beside the steps, in the thread
// of whoever prepares an image; for a large one it takes a quarter of the cores, four at the most.
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
  const uint8_t* in;  // [height, width, in_pixel], of which the first three are looked at
  uint8_t* out;       // [out_height, out_width, 3]
  int64_t height, width;
  int64_t in_pixel;  // 3, or 4 as Pillow has them
  int64_t out_height, out_width;
  ResizeFilter filter;
};

// REQUIRES: no size is 0, in_pixel is 3 or 4
void resize(const ResizeParams& p);

// What each of `count` places is made of: weights[i, k] of place first[i] + k, for k < num[i].
struct ResizeTaps {
  const int32_t* weights;  // [count, stride]
  const int32_t* first;    // [count]
  const int32_t* num;      // [count]
  int64_t count, stride;
};

// Rows [begin, end) of what a pass over columns makes, [rows, in_size, in_pixel] → [rows, count, 3].
struct ResizeColumns {
  const uint8_t* in;
  uint8_t* out;
  int64_t begin, end;
  int64_t in_size, in_pixel;
  ResizeTaps taps;
  uint8_t* scratch;  // [in_size * in_pixel + count * 3, 16]
};

// Rows [begin, end) of what a pass over rows makes, [in_size, columns] → [count, columns].
struct ResizeRows {
  const uint8_t* in;
  uint8_t* out;
  int64_t begin, end;
  int64_t columns;  // with their channels
  ResizeTaps taps;
};

}  // namespace bequest
