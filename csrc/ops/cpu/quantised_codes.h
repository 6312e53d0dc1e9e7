// What kernels read of the formats of ops/cpu/quantised.h, vector by vector; for files that are compiled per
// instruction set.
#pragma once

#include "ops/cpu/linear_tiles.h"
#include "ops/cpu/quantised.h"

namespace bequest::BEQUEST_ISA {
namespace {

inline VecU load_words(const uint32_t* p) {
  VecU v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

// The octets of some columns as floats. GCC 12 would widen them in halves that it joins again.
template <class Octet>
VecF load_octets(const Octet* p) {
  [[maybe_unused]] constexpr bool kSigned = Octet(-1) < Octet(0);
#if defined(BEQUEST_ISA_avx512)
  const __m128i octets = _mm_loadu_si128((const __m128i*)p);
  return (VecF)_mm512_maskz_cvtepi32_ps(0xffff, kSigned ? _mm512_maskz_cvtepi8_epi32(0xffff, octets)
                                                        : _mm512_maskz_cvtepu8_epi32(0xffff, octets));
#elif defined(BEQUEST_ISA_avx2)
  const __m128i octets = _mm_loadl_epi64((const __m128i*)p);
  return (VecF)_mm256_cvtepi32_ps(kSigned ? _mm256_cvtepi8_epi32(octets) : _mm256_cvtepu8_epi32(octets));
#else
  return VecF{static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]),
              static_cast<float>(p[3])};
#endif
}

// A group of its own: its scales are halves. Codes of 4 bits have an offset, those of 8 bits a sign.
template <int Bits>
struct GroupCodes {
  using Block = QuantisedGroup<Bits>;
  static constexpr int kBits = Bits, kHighBits = 0;
  static constexpr int kBlockGroups = 1;        // groups of a block
  static constexpr int kScales = 1;             // of a group
  static constexpr int kWordCodes = 32 / Bits;  // codes of a word
  static constexpr int kWords = Block::kWords;  // of a group and a column
  static constexpr int kLeast = 0;              // what a code of 0 stands for, where there is no offset
  static constexpr bool kHasOffset = Bits == 4;

  static const uint32_t* words(const Block& block, int, int w) { return block.words[w]; }
  static const uint32_t* high(const Block&, int, int) { return nullptr; }
  static VecF scale(const Block& block, int, int, int v) { return load_half(block.scales + v * kLanes); }
  static VecF offset(const Block& block, int, int v) { return load_half(block.offsets + v * kLanes); }
};

// One of 8 groups of a block.
template <int Bits>
struct SuperCodes {
  using Block = SuperBlock<Bits>;
  static constexpr int kBits = Bits, kHighBits = Bits - 4;
  static constexpr int kBlockGroups = kSuperGroups;
  static constexpr int kScales = Bits == 6 ? 2 : 1;
  static constexpr int kWordCodes = 8;
  static constexpr int kWords = 4;
  static constexpr int kLeast = Bits == 6 ? -32 : 0;
  static constexpr bool kHasOffset = Bits != 6;

  static const uint32_t* words(const Block& block, int group, int w) { return block.words[group][w]; }
  static const uint32_t* high(const Block& block, int group, int word) { return block.high[group][word]; }
  static VecF scale(const Block& block, int group, int part, int v) {
    return load_half(block.scales + v * kLanes) *
           load_octets(block.group_scales[group * kScales + part] + v * kLanes);
  }
  static VecF offset(const Block& block, int group, int v) {
    if constexpr (kHasOffset)
      return load_half(block.offsets + v * kLanes) * -load_octets(block.group_offsets[group] + v * kLanes);
    return VecF{};
  }
};

// f<Codes>() for the codes of a format.
template <class F>
void with_codes(WeightFormat format, F f) {
  switch (exact_of(format)) {
    case WeightFormat::kQ4:
      return f.template operator()<GroupCodes<4>>();
    case WeightFormat::kQ8:
      return f.template operator()<GroupCodes<8>>();
    case WeightFormat::kK4:
      return f.template operator()<SuperCodes<4>>();
    case WeightFormat::kK5:
      return f.template operator()<SuperCodes<5>>();
    case WeightFormat::kK6:
      return f.template operator()<SuperCodes<6>>();
    default:
      fail("linear: no codes");
  }
}

// Rows that read codes, of `most`: codes that take longer to read are read for fewer rows.
template <class Codes>
constexpr int few_rows(int most) {
  return Codes::kBlockGroups == 1 || most < 4 ? most : 4;
}

// A block of a panel, and the group of a panel's that has number g.
template <class Codes>
struct GroupPlace {
  int64_t block;
  int group;  // of the block

  explicit GroupPlace(int64_t g)
      : block(g / Codes::kBlockGroups), group(static_cast<int>(g % Codes::kBlockGroups)) {}
};

// Asks for the share of a group of what follows at a block, `ahead` blocks away.
template <class Codes>
void prefetch_group(const typename Codes::Block* ahead, int group) {
  constexpr size_t kShare = sizeof(typename Codes::Block) / Codes::kBlockGroups;
  for (size_t line = 0; line < kShare; line += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(ahead) + group * kShare + line, 0, 2);
}

}  // namespace
}  // namespace bequest::BEQUEST_ISA
