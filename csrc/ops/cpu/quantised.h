// Weights in the codes of a quantised file: every group of 32 values of a row has a scale and an offset, and
//
//   value = scale * code + offset
//
// which float32 multiply-add gives exactly as the file means it: a 16-bit scale times a code of 8 bits has no
// rounding, and the sum is rounded once. So a product over these codes has the bits of a product over the
// float32 weights, and reads a fifth or a quarter of the memory.
//
// Packed for panels of 16 output columns, as in ops/cpu/linear.h: [ceil(N / 16), blocks of K, block of a
// panel]. A block is a group (formats kQ4 and kQ8),
//
//   scales [16] half | offsets [16] half | words [32 * kBits / 32][16]
//
// or 8 groups whose scales are themselves in codes, as in GGUF's K types (kK4, kK5, kK6):
//
//   scale = half * group_scale        offset = -(half * group_offset)
//
// where the products are exact, too. A word holds the codes of 32 / kBits successive k of one column, the
// first in its lowest bits, so a vector of words becomes vectors of weights by shifts. Of 5 and 6 bits the
// lowest four are in words of 4 bits, and the others in words of their own.
#pragma once

#include <cstdint>

#include "ops/cpu/linear.h"

namespace bequest {

inline constexpr int64_t kGroup = 32;  // values of k with one scale

// 4 bits: codes 0 … 15. 8 bits: codes -128 … 127.
template <int Bits>
struct QuantisedGroup {
  static constexpr int kPerWord = 32 / Bits;
  static constexpr int kWords = kGroup / kPerWord;

  uint16_t scales[kPanelWidth];   // float16
  uint16_t offsets[kPanelWidth];  // float16
  uint32_t words[kWords][kPanelWidth];

  // Code of k < 32 of a column.
  [[gnu::always_inline]] int code(int64_t k, int64_t column) const {
    const uint32_t up = words[k / kPerWord][column] << (32 - Bits - k % kPerWord * Bits);
    return Bits == 8 ? static_cast<int32_t>(up) >> 24 : static_cast<int>(up >> 28);
  }
};
static_assert(sizeof(QuantisedGroup<4>) == 320 && sizeof(QuantisedGroup<8>) == 576);

// 256 values of k. 4 bits: codes 0 … 15; 5 bits: 0 … 31.
template <int Bits>
struct SuperBlock {
  static constexpr int kHighBits = Bits - 4;

  uint32_t words[8][4][kPanelWidth];
  uint32_t high[8][kHighBits][kPanelWidth];
  uint8_t group_scales[8][kPanelWidth];   // 0 … 63
  uint8_t group_offsets[8][kPanelWidth];  // 0 … 63
  uint16_t scales[kPanelWidth];           // float16
  uint16_t offsets[kPanelWidth];          // float16
};
// 6 bits: codes 0 … 63 that stand for -32 … 31; a scale is of 16 values, and there is no offset.
template <>
struct SuperBlock<6> {
  static constexpr int kHighBits = 2;

  uint32_t words[8][4][kPanelWidth];
  uint32_t high[8][kHighBits][kPanelWidth];
  int8_t group_scales[16][kPanelWidth];
  uint16_t scales[kPanelWidth];  // float16
  uint16_t padding[kPanelWidth];
};
static_assert(sizeof(SuperBlock<4>) == 2368 && sizeof(SuperBlock<5>) == 2880 &&
              sizeof(SuperBlock<6>) == 3392);

inline constexpr int kSuperGroups = 8;  // groups of a SuperBlock

// Where a word of high bits has those of code k < 32 of its group: so that a pair of codes, four apart, has
// them 16 bits apart, as it has its lower bits.
struct HighPlace {
  int word, shift;
};
[[gnu::always_inline]] constexpr HighPlace high_place(int high_bits, int k) {
  const int number = k / 8 * 4 + k % 4;  // of 16 pairs
  const int each = 16 / high_bits;       // pairs of a word
  return {number / each, k % 8 / 4 * 16 + number % each * high_bits};
}

// The types of GGUF files.
enum class StoredCodes : int { kQ4_0 = 0, kQ4_1 = 1, kQ8_0 = 2, kQ4_K = 3, kQ5_K = 4, kQ6_K = 5 };

struct QuantisedPackParams {
  const uint8_t* rows;  // [rows, blocks of K values]
  StoredCodes stored;
  void* packed;       // [ceil(N / 16), blocks of a panel]
  int64_t first_row;  // the row of the packed weight that row 0 becomes
  int64_t num_rows;
  int64_t in_features;  // K
};

// Writes rows [first_row, first_row + num_rows) of the packed weight; the padding is the caller's.
// REQUIRES: the values of a block divide K; no concurrent call writes to the same panel.
void pack_quantised(const QuantisedPackParams& p);

}  // namespace bequest
