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

// 8 groups of a row as the file holds them.
struct GroupScales {
  uint8_t octets[12];  // 8 scales and 8 offsets of 6 bits

  uint8_t scale(int group) const {
    if (group < 4) return octets[group] & 63;
    return static_cast<uint8_t>((octets[group + 4] & 15) | octets[group - 4] >> 6 << 4);
  }
  uint8_t offset(int group) const {
    if (group < 4) return octets[group + 4] & 63;
    return static_cast<uint8_t>(octets[group + 4] >> 4 | octets[group] >> 6 << 4);
  }
};
struct Q4_K {
  static constexpr int kBits = 4;
  uint16_t scale, offset;
  GroupScales groups;
  uint8_t codes[128];

  uint32_t code(int group, int k) const { return codes[group / 2 * 32 + k] >> group % 2 * 4 & 15u; }
};
struct Q5_K {
  static constexpr int kBits = 5;
  uint16_t scale, offset;
  GroupScales groups;
  uint8_t high[32];
  uint8_t codes[128];

  uint32_t code(int group, int k) const {
    const uint32_t low = codes[group / 2 * 32 + k] >> group % 2 * 4 & 15u;
    return low | (high[k] >> group & 1u) << 4;
  }
};
struct Q6_K {
  static constexpr int kBits = 6;
  uint8_t codes[128];
  uint8_t high[64];
  int8_t groups[16];
  uint16_t scale;

  uint32_t code(int group, int k) const {
    const int half = group / 4, quarter = group % 4;
    const uint32_t low = codes[half * 64 + quarter % 2 * 32 + k] >> quarter / 2 * 4 & 15u;
    return low | (high[half * 32 + k] >> 2 * quarter & 3u) << 4;
  }
};
static_assert(sizeof(Q4_K) == 144 && sizeof(Q5_K) == 176 && sizeof(Q6_K) == 210);

template <class Stored>
void write(const Stored& stored, int64_t column, SuperBlock<Stored::kBits>& to) {
  constexpr int kHighBits = Stored::kBits - 4;
  to.scales[column] = stored.scale;
  if constexpr (kHighBits < 2) to.offsets[column] = stored.offset;
  for (int group = 0; group < kSuperGroups; ++group) {
    if constexpr (kHighBits == 2) {
      for (int part = 0; part < 2; ++part)
        to.group_scales[2 * group + part][column] = stored.groups[2 * group + part];
    } else {
      to.group_scales[group][column] = stored.groups.scale(group);
      to.group_offsets[group][column] = stored.groups.offset(group);
    }
    uint32_t words[4] = {}, high[2] = {};
    for (int k = 0; k < kGroup; ++k) {
      const uint32_t code = stored.code(group, k);
      words[k / 8] |= (code & 15u) << 4 * (k % 8);
      if constexpr (kHighBits > 0) {
        const HighPlace place = high_place(kHighBits, k);
        high[place.word] |= code >> 4 << place.shift;
      }
    }
    for (int i = 0; i < 4; ++i) to.words[group][i][column] = words[i];
    for (int i = 0; i < kHighBits; ++i) to.high[group][i][column] = high[i];
  }
}

template <class Stored>
void write(const Stored& stored, int64_t column, QuantisedGroup<Stored::kBits>& to) {
  to.scales[column] = stored.scale;
  to.offsets[column] = stored.offset();
  for (int i = 0; i < QuantisedGroup<Stored::kBits>::kWords; ++i) to.words[i][column] = stored.word(i);
}

template <class Stored, class Block, int64_t Values>
void pack(const QuantisedPackParams& p) {
  check(p.in_features >= Values && p.in_features % Values == 0,
        "pack_quantised: K is no whole number of blocks");
  const int64_t blocks = p.in_features / Values;
  parallel_for(p.num_rows, 64, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const uint8_t* from = p.rows + row * blocks * int64_t{sizeof(Stored)};
      const int64_t panel = (p.first_row + row) / kPanelWidth, column = (p.first_row + row) % kPanelWidth;
      Block* to = static_cast<Block*>(p.packed) + panel * blocks;
      for (int64_t i = 0; i < blocks; ++i, from += sizeof(Stored)) {
        Stored stored;
        std::memcpy(&stored, from, sizeof(stored));
        write(stored, column, to[i]);
      }
    }
  });
}

template <class Stored>
void pack_groups(const QuantisedPackParams& p) {
  pack<Stored, QuantisedGroup<Stored::kBits>, kGroup>(p);
}
template <class Stored>
void pack_super(const QuantisedPackParams& p) {
  pack<Stored, SuperBlock<Stored::kBits>, kGroup * kSuperGroups>(p);
}

}  // namespace

void pack_quantised(const QuantisedPackParams& p) {
  check(p.first_row >= 0 && p.num_rows >= 0, "pack_quantised: negative rows");
  switch (p.stored) {
    case StoredCodes::kQ4_0:
      return pack_groups<Q4_0>(p);
    case StoredCodes::kQ4_1:
      return pack_groups<Q4_1>(p);
    case StoredCodes::kQ8_0:
      return pack_groups<Q8_0>(p);
    case StoredCodes::kQ4_K:
      return pack_super<Q4_K>(p);
    case StoredCodes::kQ5_K:
      return pack_super<Q5_K>(p);
    case StoredCodes::kQ6_K:
      return pack_super<Q6_K>(p);
  }
  fail("pack_quantised: unknown codes");
}

}  // namespace bequest
