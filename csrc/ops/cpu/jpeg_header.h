// What stands before the pixels of a JPEG file: its size, its tables, where its pixels begin. Files are taken
// that nearly all cameras and encoders write: baseline, 8 bits, YCbCr with chroma of full or half size, one
// scan, no restarts. The others are left to a library.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

namespace bequest {

inline constexpr int kJpegBlock = 64;  // values of 8 × 8 pixels

// Codes of at most 16 bits. REQUIRES of whoever reads: `lookup` by the next kLookBits bits; where it has no
// length, longer codes are found by `most` and `shift`.
struct JpegCodes {
  static constexpr int kLookBits = 10;
  struct Entry {
    uint8_t length = 0;  // of the code; 0: it is longer than kLookBits, or there is none
    uint8_t symbol = 0;
  };
  struct Short {
    int16_t value = 0;
    uint8_t run = 0;     // of zeros before it
    uint8_t length = 0;  // of the code and the value; 0: they are longer together, or it is no value
  };
  std::array<Entry, 1 << kLookBits> lookup;
  std::array<Short, 1 << kLookBits> shorts;  // of AC codes
  std::array<int32_t, 18> most;              // by length: the largest code of it; -1: there is none
  std::array<int32_t, 18> shift;             // by length: from a code to the place of its symbol
  std::array<uint8_t, 256> symbols;
};

struct JpegComponent {
  std::array<uint16_t, kJpegBlock> steps;  // of quantisation, in zigzag order
  int dc, ac;                              // which codes
};

struct JpegHeader {
  int64_t height, width;
  bool is_halved;                           // chroma, in both directions
  std::array<JpegComponent, 3> components;  // Y, Cb, Cr
  std::array<JpegCodes, 2> dc, ac;
  const uint8_t* begin;  // of the coded pixels
  const uint8_t* end;    // of the file

  int64_t side() const { return is_halved ? 16 : 8; }  // of a unit: blocks of all components
  int64_t unit_rows() const { return (height + side() - 1) / side(); }
  int64_t unit_columns() const { return (width + side() - 1) / side(); }
  int blocks() const { return is_halved ? 6 : 3; }  // of a unit: those of Y come first
};

// None: the file is broken, or not one that is taken.
std::optional<JpegHeader> read_jpeg_header(const uint8_t* data, int64_t size);

}  // namespace bequest
