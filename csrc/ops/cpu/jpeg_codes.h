// The codes of a JPEG's pixels, read in order: row by row of units.
#pragma once

#include <array>
#include <cstdint>

#include "ops/cpu/jpeg_header.h"

namespace bequest {

// Where a reader is.
struct JpegPlace {
  const uint8_t* at;     // the next byte
  uint64_t held = 0;     // bits, from the highest on
  int num = 0;           // of them
  int num_invented = 0;  // of them, the last ones: zeros behind the end
  std::array<int, 3> last_dc{};
};

// Reads the next row of units: values [unit_columns, blocks, 64], in rows and multiplied by their steps.
// False: the codes are broken or end before the row does, or values are so large that libraries differ.
bool read_jpeg_row(const JpegHeader& header, JpegPlace& place, int16_t* values);

}  // namespace bequest
