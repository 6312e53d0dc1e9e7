// Dot products of codes with integers of 16 bits, for *.dot.cpp files. A word is 32 bits of codes or of
// integers: a pair of 16 bits, or a quad of 8 bits where the chip multiplies bytes.
#pragma once

#include "core/simd.h"

namespace bequest::BEQUEST_ISA {

typedef int16_t VecS __attribute__((vector_size(kLanes * 4)));  // pairs
typedef int8_t VecB __attribute__((vector_size(kLanes * 4)));   // quads
typedef uint8_t VecO __attribute__((vector_size(kLanes * 4)));  // octets

#if defined(BEQUEST_DOT_dotprod)
inline constexpr bool kQuads = true;
#else
inline constexpr bool kQuads = false;
#endif

#if defined(BEQUEST_DOT_dotprod)

// sum + codes · one word of x, in each lane.
template <int Word>
VecI add_quads(VecI sum, VecU codes, VecU x) {
  return (VecI)vdotq_laneq_s32((int32x4_t)sum, (int8x16_t)codes, (int8x16_t)x, Word);
}

#else

inline VecU broadcast_word(uint32_t word) { return word + VecU{}; }

// sum + codes · a word of x, in each lane.
inline VecI add_pairs(VecI sum, VecU codes, const uint32_t* x) {
  const VecU q = broadcast_word(*x);
#if defined(BEQUEST_DOT_avx512vnni)
  return (VecI)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)codes, (__m512i)q);
#elif defined(BEQUEST_ISA_avx512)
  return sum + (VecI)_mm512_madd_epi16((__m512i)codes, (__m512i)q);
#elif defined(BEQUEST_DOT_avxvnni)
  return (VecI)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)q);
#elif defined(BEQUEST_ISA_avx2)
  return sum + (VecI)_mm256_madd_epi16((__m256i)codes, (__m256i)q);
#else
  return sum + ((VecI)(codes << 16) >> 16) * ((VecI)(q << 16) >> 16) + ((VecI)codes >> 16) * ((VecI)q >> 16);
#endif
}

#endif

}  // namespace bequest::BEQUEST_ISA
