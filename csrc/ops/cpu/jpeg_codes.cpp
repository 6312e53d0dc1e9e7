#include "ops/cpu/jpeg_codes.h"

#include "core/isa.h"

namespace bequest {

BEQUEST_DECLARE_PER_ISA(bool jpeg_codes(const JpegHeader& header, JpegPlace& place, int16_t* values))

bool read_jpeg_row(const JpegHeader& header, JpegPlace& place, int16_t* values) {
  BEQUEST_DISPATCH_ISA(jpeg_codes(header, place, values));
}

}  // namespace bequest
