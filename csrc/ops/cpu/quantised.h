// Weights in the codes of a quantised file: every group of 32 values of a row has a scale and an offset, and
//
//   value = scale * code + offset
//
// which float32 multiply-add gives exactly as the file means it: a 16-bit scale times a code of 8 bits has no
// rounding, and the sum is rounded once. So a product over these codes has the bits of a product over the
// float32 weights, and reads a fifth or a quarter of the memory.
//
// Packed for panels of 16 output columns, as in ops/cpu/linear.h: [ceil(N / 16), K / 32, group of a panel]
//
//   scales [16] half | offsets [16] half | words [32 * kBits / 32][16]
//
// A word holds the codes of 32 / kBits successive k of one column, the first in its lowest bits, so a vector
// of words becomes vectors of weights by shifts.
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

// The types of GGUF files.
enum class StoredCodes : int { kQ4_0 = 0, kQ4_1 = 1, kQ8_0 = 2 };

struct QuantisedPackParams {
  const uint8_t* rows;  // [rows, blocks of K values]
  StoredCodes stored;
  void* packed;       // [ceil(N / 16), K / 32, QuantisedGroup]
  int64_t first_row;  // the row of the packed weight that row 0 becomes
  int64_t num_rows;
  int64_t in_features;  // K
};

// Writes rows [first_row, first_row + num_rows) of the packed weight; the padding is the caller's.
// REQUIRES: 32 divides K; no concurrent call writes to the same panel.
void pack_quantised(const QuantisedPackParams& p);

}  // namespace bequest
