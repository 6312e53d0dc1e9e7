#include "ops/cpu/quantised.h"

#include "core/threads.h"

namespace bequest {
namespace {

// -8 times a float16, which is one too up to 8188; beyond it, as no weight is, infinite.
uint16_t minus_eight_times(uint16_t half) {
  const uint32_t sign = ~half & 0x8000u, exponent = half >> 10 & 31;
  uint32_t mantissa = half & 0x3ffu;
  if (exponent == 31) return static_cast<uint16_t>(sign | (half & 0x7fffu));
  if (exponent >= 28) return static_cast<uint16_t>(sign | 0x7c00u);
  if (exponent > 0) return static_cast<uint16_t>(sign | (exponent + 3) << 10 | mantissa);
  mantissa *= 8;  // of 2^-24
  uint32_t shift = 0;
  while (mantissa >> shift >= 2048) ++shift;
  const bool is_normal = mantissa >= 1024;
  return static_cast<uint16_t>(sign |
                               (is_normal ? (shift + 1) << 10 | (mantissa >> shift & 0x3ffu) : mantissa));
}

// A group of a row as the file holds it.
struct Nibbles {
  uint8_t octets[16];  // code k in the low half of octet k, code 16 + k in the high one

  uint32_t word(int index) const {
    const int shift = index / 2 * 4;
    uint32_t word = 0;
    for (int i = 0; i < 8; ++i) word |= uint32_t{octets[index % 2 * 8 + i] >> shift & 15u} << 4 * i;
    return word;
  }
};
struct Q4_1 {
  static constexpr int kBits = 4;
  uint16_t scale, least;
  Nibbles codes;

  uint16_t offset() const { return least; }
  uint32_t word(int index) const { return codes.word(index); }
};
struct Q4_0 {
  static constexpr int kBits = 4;
  uint16_t scale;
  Nibbles codes;

  uint16_t offset() const { return minus_eight_times(scale); }
  uint32_t word(int index) const { return codes.word(index); }
};
struct Q8_0 {
  static constexpr int kBits = 8;
  uint16_t scale;
  uint8_t codes[32];

  static uint16_t offset() { return 0; }

  uint32_t word(int index) const {
    uint32_t word;
    std::memcpy(&word, codes + 4 * index, sizeof(word));
    return word;
  }
};
static_assert(sizeof(Q4_0) == 18 && sizeof(Q4_1) == 20 && sizeof(Q8_0) == 34);

template <class Stored>
void pack(const QuantisedPackParams& p) {
  using Group = QuantisedGroup<Stored::kBits>;
  const int64_t groups = p.in_features / kGroup;
  parallel_for(p.num_rows, 64, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const uint8_t* from = p.rows + row * groups * int64_t{sizeof(Stored)};
      const int64_t panel = (p.first_row + row) / kPanelWidth, column = (p.first_row + row) % kPanelWidth;
      Group* to = static_cast<Group*>(p.packed) + panel * groups;
      for (int64_t g = 0; g < groups; ++g, from += sizeof(Stored)) {
        Stored stored;
        std::memcpy(&stored, from, sizeof(stored));
        to[g].scales[column] = stored.scale;
        to[g].offsets[column] = stored.offset();
        for (int i = 0; i < Group::kWords; ++i) to[g].words[i][column] = stored.word(i);
      }
    }
  });
}

}  // namespace

void pack_quantised(const QuantisedPackParams& p) {
  check(p.first_row >= 0 && p.num_rows >= 0, "pack_quantised: negative rows");
  check(p.in_features >= kGroup && p.in_features % kGroup == 0, "pack_quantised: K is no multiple of 32");
  switch (p.stored) {
    case StoredCodes::kQ4_0:
      return pack<Q4_0>(p);
    case StoredCodes::kQ4_1:
      return pack<Q4_1>(p);
    case StoredCodes::kQ8_0:
      return pack<Q8_0>(p);
  }
  fail("pack_quantised: unknown codes");
}

}  // namespace bequest
