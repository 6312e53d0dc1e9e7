// Portable vectors for *.simd.cpp files: GCC vector extensions, so that one source serves AVX2, AVX-512 and
// NEON. a * b + c on vectors contracts to a fused multiply-add (the compiler's default), which is what the
// kernels rely on.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

#include "core/half.h"

namespace bequest::BEQUEST_ISA {

#if defined(BEQUEST_ISA_avx512)
inline constexpr int kLanes = 16;
#elif defined(BEQUEST_ISA_avx2)
inline constexpr int kLanes = 8;
#elif defined(BEQUEST_ISA_neon)
inline constexpr int kLanes = 4;
#else
#error "simd.h is for *.simd.cpp files, compiled with BEQUEST_ISA"
#endif

typedef float VecF __attribute__((vector_size(kLanes * 4)));
typedef int32_t VecI __attribute__((vector_size(kLanes * 4)));
typedef uint32_t VecU __attribute__((vector_size(kLanes * 4)));
typedef uint16_t VecH __attribute__((vector_size(kLanes * 2)));  // the bits of kLanes bfloat16

inline VecF broadcast(float x) { return x - VecF{}; }
inline VecF load(const float* p) {
  VecF v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
inline VecF load(const BFloat16* p) {
  VecH h;
  std::memcpy(&h, p, sizeof(h));
#if defined(BEQUEST_ISA_avx512)
  // One shuffle that also zeroes the low halves; widening and shifting would take two of the multiply-add's
  // slots.
  const __m512i spread = _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0,  //
                                          7, 0, 6, 0, 5, 0, 4, 0, 3, 0, 2, 0, 1, 0, 0, 0);
  return (VecF)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, spread,
                                              _mm512_maskz_broadcast_i64x4(0xff, (__m256i)h));
#elif defined(BEQUEST_ISA_avx2)
  // GCC 12 widens 16-bit vectors on x86 in halves that it joins again; this is one instruction.
  return (VecF)((VecU)_mm256_cvtepu16_epi32((__m128i)h) << 16);
#else
  // Zeros in between are one instruction of either pipe; widening and shifting are two of the same one.
  return (VecF)vzip1q_u16(vdupq_n_u16(0), vcombine_u16((uint16x4_t)h, vcreate_u16(0)));
#endif
}
#if defined(BEQUEST_ISA_neon)
// One of two vectors that lie behind each other, which are read together.
inline VecF load_of_two(const BFloat16* p, int which) {
  const uint16x8_t both = vld1q_u16(&p->bits), zeros = vdupq_n_u16(0);
  return (VecF)(which == 0 ? vzip1q_u16(zeros, both) : vzip2q_u16(zeros, both));
}
#endif
inline VecF load_half(const uint16_t* p) {  // the bits of float16
#if defined(BEQUEST_ISA_avx512)
  return (VecF)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)p));
#elif defined(BEQUEST_ISA_avx2)
  return (VecF)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  return (VecF)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#endif
}
inline VecF load(const Float16* p) { return load_half(&p->bits); }
inline VecF load(const Float8* p) {
  // The bits moved to where float16 has them are the value over 2^8, except for NaN.
#if defined(BEQUEST_ISA_avx512)
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)), 8);
  const __m256i half = _mm256_and_si256(_mm256_srai_epi16(wide, 1), _mm256_set1_epi16((int16_t)0xbf80));
  const VecF v = (VecF)_mm512_maskz_cvtph_ps(0xffff, half) * 256.0f;
#elif defined(BEQUEST_ISA_avx2)
  const __m128i wide = _mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p)), 8);
  const __m128i half = _mm_and_si128(_mm_srai_epi16(wide, 1), _mm_set1_epi16((int16_t)0xbf80));
  const VecF v = (VecF)_mm256_cvtph_ps(half) * 256.0f;
#else
  uint32_t four;
  std::memcpy(&four, p, sizeof(four));
  const uint16x4_t bytes = vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four))));
  const int16x4_t wide = vreinterpret_s16_u16(vshl_n_u16(bytes, 8));
  const uint16x4_t half = vand_u16(vreinterpret_u16_s16(vshr_n_s16(wide, 1)), vdup_n_u16(0xbf80));
  const VecF v = (VecF)vcvt_f32_f16(vreinterpret_f16_u16(half)) * 256.0f;
#endif
  // 480 would follow on the largest value, 448, and is the code of NaN.
  return ((VecU)v & 0x7fffffffu) == 0x43f00000u ? broadcast(__builtin_nanf("")) : v;
}
inline void store(float* p, VecF v) { std::memcpy(p, &v, sizeof(v)); }
inline void store(BFloat16* p, VecF v) {
  const VecU bits = (VecU)v;
  const VecU rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const VecU quieted = (bits >> 16) | 0x40u;
  const VecU result = (bits & 0x7fffffffu) > 0x7f800000u ? quieted : rounded;
  const VecH h = __builtin_convertvector(result, VecH);
  std::memcpy(p, &h, sizeof(h));
}

inline void store(Float16* p, VecF v) {  // to nearest even; what is too large becomes the largest value
  const VecF largest = broadcast(65504.0f);
  v = v > largest ? largest : v < -largest ? -largest : v;  // NaN stays
#if defined(BEQUEST_ISA_avx512)
  _mm256_storeu_si256((__m256i*)p, _mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(BEQUEST_ISA_avx2)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
  vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v)));
#endif
}

inline void store(Float8* p, VecF v) {  // as from_float<Float8>
  typedef uint8_t VecB __attribute__((vector_size(kLanes)));
  const VecU magnitude = (VecU)v & 0x7fffffffu;
  const VecU normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  const VecU small = (VecU)((VecF)magnitude + 16384.0f) & 15u;
  const VecU finite = magnitude < 0x3c800000u ? small : magnitude < 0x43e00000u ? normal : VecU{} + 0x7eu;
  const VecU code = magnitude > 0x7f800000u ? VecU{} + 0x7fu : finite;
  const VecB bytes = __builtin_convertvector(code | ((VecU)v >> 24 & 0x80u), VecB);
  std::memcpy(p, &bytes, sizeof(bytes));
}

// a > b ? a : b, so b where one is NaN.
inline VecF max(VecF a, VecF b) {
#if defined(BEQUEST_ISA_avx512)
  return (VecF)_mm512_maskz_max_ps(0xffff, a, b);  // GCC 12 would compare and blend
#elif defined(BEQUEST_ISA_avx2)
  return (VecF)_mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
inline VecF min(VecF a, VecF b) { return a < b ? a : b; }

// In halves, so that the chain of dependent operations is short.
template <class Combine>
float reduce(VecF v, Combine combine) {
  typedef float Vec4 __attribute__((vector_size(16)));
  Vec4 parts[kLanes / 4];
  std::memcpy(parts, &v, sizeof(v));
  for (int n = kLanes / 8; n > 0; n /= 2)
    for (int i = 0; i < n; ++i)
      for (int c = 0; c < 4; ++c) parts[i][c] = combine(parts[i][c], parts[i + n][c]);
  return combine(combine(parts[0][0], parts[0][2]), combine(parts[0][1], parts[0][3]));
}
inline float reduce_add(VecF v) {
  return reduce(v, [](float a, float b) { return a + b; });
}
inline float reduce_max(VecF v) {
  return reduce(v, [](float a, float b) { return a > b ? a : b; });
}

// e^x to about 1 ulp; 0 below -87.3, infinite above 88.7. NaN is not kept.
inline VecF exp(VecF x) {
  const VecF lo = broadcast(-87.3365f);
  const VecF hi = broadcast(88.7228f);
  const VecF clamped = min(max(x, lo), hi);
  const VecF shift = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const VecF n = (clamped * 1.44269504f + shift) - shift;
  VecF r = clamped - n * 0.693145752f;
  r = r - n * 1.42860677e-6f;
  VecF p = broadcast(1.98756915e-4f);
  p = p * r + 1.39819995e-3f;
  p = p * r + 8.33345205e-3f;
  p = p * r + 4.16657962e-2f;
  p = p * r + 1.66666657e-1f;
  p = p * r + 5.00000012e-1f;
  p = p * r * r + r + 1.0f;
  const VecI e = __builtin_convertvector(n, VecI);
  // 2^n in two factors, since n may be 128.
  const VecI half = e >> 1;
  const VecF a = (VecF)((half + 127) << 23);
  const VecF b = (VecF)((e - half + 127) << 23);
  const VecF overflow = broadcast(__builtin_inff());
  return x < lo ? VecF{} : x > hi ? overflow : p * a * b;
}

}  // namespace bequest::BEQUEST_ISA
