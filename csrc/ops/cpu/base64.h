// Text in base64 → bytes. What is not plain (blanks, padding in the middle, other alphabets) is left to
// whoever can say what is wrong with it.
#pragma once

#include <cstdint>

namespace bequest {

// Bytes that `size` characters stand for; -1: no text of base64 ends so.
int64_t base64_size(const char* text, int64_t size);

// False: a character is none of base64's, and what is in `out` means nothing.
// REQUIRES: base64_size(text, size) bytes at `out`, and that is not -1
bool decode_base64(const char* text, int64_t size, uint8_t* out);

}  // namespace bequest
