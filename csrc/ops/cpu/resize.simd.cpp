// Sixteen values at a time, in 32 bits. A pass over rows finds them next to each other. A pass over columns
// takes sixteen rows at once and lays them the other way first, so that it does, too.
#include "ops/cpu/resize.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace bequest::BEQUEST_ISA {
namespace {

constexpr int kWeightBits = 22;
constexpr int64_t kLanes = 16;

using Bytes = uint8_t __attribute__((vector_size(kLanes)));
inline Bytes load(const uint8_t* from) {
  Bytes values;
  __builtin_memcpy(&values, from, kLanes);
  return values;
}

inline void store(uint8_t* to, Bytes values) { __builtin_memcpy(to, &values, kLanes); }

// GCC takes conversions between vectors of these sizes apart, byte by byte: they are written out.
#if defined(__AVX2__) && !defined(__AVX512F__)

struct Sums {
  __m256i low, high;
};

inline Sums half() {
  const __m256i value = _mm256_set1_epi32(1 << (kWeightBits - 1));
  return {value, value};
}

inline Sums weighted(Sums sums, const uint8_t* from, int32_t weight) {
  const __m128i values = (__m128i)load(from);
  const __m256i factor = _mm256_set1_epi32(weight);
  const __m256i low = _mm256_mullo_epi32(_mm256_cvtepu8_epi32(values), factor);
  const __m256i high = _mm256_mullo_epi32(_mm256_cvtepu8_epi32(_mm_srli_si128(values, 8)), factor);
  return {_mm256_add_epi32(sums.low, low), _mm256_add_epi32(sums.high, high)};
}

// In 8 bits: what is below 0 or above 255 becomes that.
inline Bytes rounded(Sums sums) {
  const __m256i low = _mm256_srai_epi32(sums.low, kWeightBits);
  const __m256i high = _mm256_srai_epi32(sums.high, kWeightBits);
  const __m256i mixed = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
  return (Bytes)_mm_packus_epi16(_mm256_castsi256_si128(mixed), _mm256_extracti128_si256(mixed, 1));
}

#else

using Sums = int32_t __attribute__((vector_size(4 * kLanes)));

inline Sums half() { return Sums{} + (1 << (kWeightBits - 1)); }

inline Sums weighted(Sums sums, const uint8_t* from, int32_t weight) {
#if defined(__AVX512F__)
  return sums + (Sums)_mm512_maskz_cvtepu8_epi32(0xffff, (__m128i)load(from)) * weight;
#else
  return sums + __builtin_convertvector(load(from), Sums) * weight;
#endif
}

inline Bytes rounded(Sums sums) {
  sums >>= kWeightBits;
  sums = sums < 0 ? Sums{} : sums;
  sums = sums > 255 ? Sums{} + 255 : sums;
  return __builtin_convertvector(sums, Bytes);
}

#endif

// rows[i][j] → rows[j][i], in four passes that lay the halves of the rows between each other.
inline void transpose(Bytes (&rows)[kLanes]) {
  for (int pass = 0; pass < 4; ++pass) {
    Bytes mixed[kLanes];
    for (int i = 0; i < 8; ++i) {
      mixed[2 * i] = __builtin_shufflevector(rows[i], rows[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21,
                                             6, 22, 7, 23);
      mixed[2 * i + 1] = __builtin_shufflevector(rows[i], rows[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28,
                                                 13, 29, 14, 30, 15, 31);
    }
    __builtin_memcpy(rows, mixed, sizeof(mixed));
  }
}

// `rows` <= 16 rows of `size` values → [size, 16]; lanes without a row repeat the last one.
void lay_down(const uint8_t* in, int64_t rows, int64_t size, uint8_t* out) {
  int64_t at = 0;
  for (; at + kLanes <= size; at += kLanes) {
    Bytes block[kLanes];
    for (int64_t r = 0; r < kLanes; ++r) block[r] = load(in + (r < rows ? r : rows - 1) * size + at);
    transpose(block);
    for (int64_t i = 0; i < kLanes; ++i) store(out + (at + i) * kLanes, block[i]);
  }
  for (; at < size; ++at) {
    for (int64_t r = 0; r < kLanes; ++r) out[at * kLanes + r] = in[(r < rows ? r : rows - 1) * size + at];
  }
}

// The way back.
void lift(const uint8_t* in, int64_t rows, int64_t size, uint8_t* out) {
  int64_t at = 0;
  for (; at + kLanes <= size; at += kLanes) {
    Bytes block[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) block[i] = load(in + (at + i) * kLanes);
    transpose(block);
    for (int64_t r = 0; r < rows; ++r) store(out + r * size + at, block[r]);
  }
  for (; at < size; ++at) {
    for (int64_t r = 0; r < rows; ++r) out[r * size + at] = in[at * kLanes + r];
  }
}

}  // namespace

void resize_columns(const ResizeColumns& p) {
  const int64_t size = p.in_size * p.in_pixel, out_size = p.taps.count * 3, pixel = p.in_pixel * kLanes;
  uint8_t* const laid = p.scratch;
  uint8_t* const made = p.scratch + size * kLanes;
  for (int64_t row = p.begin; row < p.end; row += kLanes) {
    const int64_t rows = p.end - row < kLanes ? p.end - row : kLanes;
    lay_down(p.in + row * size, rows, size, laid);
    for (int64_t i = 0; i < p.taps.count; ++i) {
      const int32_t* const weights = p.taps.weights + i * p.taps.stride;
      const uint8_t* from = laid + p.taps.first[i] * pixel;
      Sums red = half(), green = half(), blue = half();
      for (int32_t k = 0; k < p.taps.num[i]; ++k, from += pixel) {
        red = weighted(red, from, weights[k]);
        green = weighted(green, from + kLanes, weights[k]);
        blue = weighted(blue, from + 2 * kLanes, weights[k]);
      }
      store(made + i * 3 * kLanes, rounded(red));
      store(made + (i * 3 + 1) * kLanes, rounded(green));
      store(made + (i * 3 + 2) * kLanes, rounded(blue));
    }
    lift(made, rows, out_size, p.out + row * out_size);
  }
}

void resize_rows(const ResizeRows& p) {
  for (int64_t i = p.begin; i < p.end; ++i) {
    const int32_t* const weights = p.taps.weights + i * p.taps.stride;
    const uint8_t* const in = p.in + p.taps.first[i] * p.columns;
    uint8_t* const out = p.out + i * p.columns;
    int64_t at = 0;
    for (; at + 2 * kLanes <= p.columns; at += 2 * kLanes) {
      Sums left = half(), right = half();
      const uint8_t* from = in + at;
      for (int32_t k = 0; k < p.taps.num[i]; ++k, from += p.columns) {
        left = weighted(left, from, weights[k]);
        right = weighted(right, from + kLanes, weights[k]);
      }
      store(out + at, rounded(left));
      store(out + at + kLanes, rounded(right));
    }
    for (; at < p.columns; ++at) {
      int32_t sum = 1 << (kWeightBits - 1);
      for (int32_t k = 0; k < p.taps.num[i]; ++k) sum += in[k * p.columns + at] * weights[k];
      sum >>= kWeightBits;
      out[at] = static_cast<uint8_t>(sum < 0 ? 0 : sum > 255 ? 255 : sum);
    }
  }
}

}  // namespace bequest::BEQUEST_ISA
