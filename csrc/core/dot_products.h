// Dot products of codes with integers of 16 bits, for *.dot.cpp files. A word is 32 bits of codes or of
// integers: a pair of 16 bits, or a quad of 8 bits where the chip multiplies bytes.
#pragma once

#include "core/simd.h"

namespace bequest::BEQUEST_ISA {

typedef int16_t VecS __attribute__((vector_size(kLanes * 4)));  // pairs
typedef int8_t VecB __attribute__((vector_size(kLanes * 4)));   // quads

#if defined(BEQUEST_DOT_dotprod)
inline constexpr bool kQuads = true;
#else
inline constexpr bool kQuads = false;
#endif

inline VecU broadcast_word(uint32_t word) { return word + VecU{}; }

#if defined(BEQUEST_DOT_dotprod)

// Sums of the products with the high and with the low digits of x, whose words follow each other.
struct DotSum {
  static constexpr int kWords = 2;
  VecI high = {}, low = {};

  void add(VecU codes, const uint32_t* x) {
    high = (VecI)vdotq_s32((int32x4_t)high, (int8x16_t)codes, (int8x16_t)broadcast_word(x[0]));
    low = (VecI)vdotq_s32((int32x4_t)low, (int8x16_t)codes, (int8x16_t)broadcast_word(x[1]));
  }
  VecI total() const { return (high << 8) + low; }
};

#else

struct DotSum {
  static constexpr int kWords = 1;  // of x that an operand is multiplied with
  VecI sum = {};

  void add(VecU codes, const uint32_t* x) {
    const VecU q = broadcast_word(*x);
#if defined(BEQUEST_DOT_avx512vnni)
    sum = (VecI)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)codes, (__m512i)q);
#elif defined(BEQUEST_ISA_avx512)
    sum += (VecI)_mm512_madd_epi16((__m512i)codes, (__m512i)q);
#elif defined(BEQUEST_DOT_avxvnni)
    sum = (VecI)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)q);
#elif defined(BEQUEST_ISA_avx2)
    sum += (VecI)_mm256_madd_epi16((__m256i)codes, (__m256i)q);
#else
    sum += ((VecI)(codes << 16) >> 16) * ((VecI)(q << 16) >> 16) + ((VecI)codes >> 16) * ((VecI)q >> 16);
#endif
  }
  VecI total() const { return sum; }
};

#endif

}  // namespace bequest::BEQUEST_ISA
