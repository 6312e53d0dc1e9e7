// A JPEG file → its pixels, to the bit as libjpeg makes them (the exact integer transform, smooth chroma).
//
// The codes are read by one thread, since where one begins is known when the one before it is read. Another
// makes pixels of what was read meanwhile, so that an image takes little longer than its codes.
#pragma once

#include <cstdint>

#include "ops/cpu/jpeg_header.h"

namespace bequest {

struct JpegParams {
  const uint8_t* data;  // [size], the file
  int64_t size;
  int64_t height, width;  // as who asks has read them
  uint8_t* out;           // [height, width, 4]: red, green, blue and 255
};

// False: it is broken, or not one that is taken; what is in `out` means nothing.
bool decode_jpeg(const JpegParams& p);

// Samples of Y, Cb and Cr, of whole units.
struct JpegPlanes {
  uint8_t* planes[3];
  int64_t strides[3];
};

}  // namespace bequest
