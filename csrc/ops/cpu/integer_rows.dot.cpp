// Rows of x rounded to integers, in the order of the words of codes.
#include "core/dot_products.h"
#include "ops/cpu/linear_integer.h"
#include "ops/cpu/quantised_operands.h"

namespace bequest::BEQUEST_ISA {
namespace {

constexpr int kParts = kGroup / kLanes;  // vectors of a block

// The largest |x| of a block. What is not a number is larger than infinity here.
float largest(const float* x) {
  VecU most = {};
  for (int i = 0; i < kParts; ++i) {
    const VecU bits = (VecU)load(x + i * kLanes) & 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  uint32_t found = 0;
  for (int lane = 0; lane < kLanes; ++lane) found = most[lane] > found ? most[lane] : found;
  float value;
  std::memcpy(&value, &found, sizeof(value));
  return value;
}

#if defined(BEQUEST_DOT_dotprod)

// The words that codes of `WordCodes` to a word are multiplied with: those of the high digits of all k, then
// those of the low ones.
template <int WordCodes>
void write_words(const int32_t* q, uint32_t* to) {
  constexpr int kQuarter = WordCodes / 4;
  uint8_t order[16];  // byte n of word p of some codes is that of k = p + n * kQuarter
  for (int i = 0; i < 16; ++i) order[i] = i / WordCodes * WordCodes + i % WordCodes / 4 + i % 4 * kQuarter;
  const uint8x16_t places = vld1q_u8(order);
  for (int i = 0; i < kGroup; i += 16) {
    int16x8_t first = vuzp1q_s16(vld1q_s16((const int16_t*)(q + i)), vld1q_s16((const int16_t*)(q + i + 4)));
    int16x8_t second =
        vuzp1q_s16(vld1q_s16((const int16_t*)(q + i + 8)), vld1q_s16((const int16_t*)(q + i + 12)));
    // A value less its high digit is its lowest byte.
    const uint8x16_t low = vuzp1q_u8((uint8x16_t)first, (uint8x16_t)second);
    first += 128;
    second += 128;
    const uint8x16_t high = vuzp2q_u8((uint8x16_t)first, (uint8x16_t)second);
    vst1q_u8((uint8_t*)(to + i / 4), vqtbl1q_u8(high, places));
    vst1q_u8((uint8_t*)(to + kBlockWords / 2 + i / 4), vqtbl1q_u8(low, places));
  }
}

#else

// The words that codes of `WordCodes` to a word are multiplied with.
template <int WordCodes>
void write_words(const int32_t* q, uint32_t* to) {
  constexpr int kHalf = WordCodes / 2;
  for (int i = 0; i < kGroup; i += WordCodes)
    for (int p = 0; p < kHalf; ++p)
      *to++ = (static_cast<uint32_t>(q[i + p]) & 0xffffu) | static_cast<uint32_t>(q[i + p + kHalf]) << 16;
}

#endif

template <int WordCodes>
void round_block(const float* x, uint32_t* words, float* steps) {
  constexpr float kInfinite = __builtin_inff(), kRounding = 12582912.0f;  // 1.5 * 2^23
  constexpr float kNothing = 1e-30f;                                      // whose inverse is finite
  const float most = largest(x);
  const bool is_number = most < kInfinite, is_large = is_number && most > kNothing;
  const float step = is_large ? most / kMostInteger : is_number ? 0.0f : __builtin_nanf("");
  const float inverse = is_large ? kMostInteger / most : 0.0f;
  VecI sum = {};
  int32_t q[kGroup];
  for (int i = 0; i < kParts; ++i) {
    const VecF near = (is_number ? load(x + i * kLanes) : VecF{}) * inverse;
    const VecI rounded = (VecI)(near + kRounding) - (VecI)broadcast(kRounding);
    sum += rounded;
    std::memcpy(q + i * kLanes, &rounded, sizeof(rounded));
  }
  int32_t total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += sum[lane];
  write_words<WordCodes>(q, words);
  steps[0] = step;
  steps[1] = step * static_cast<float>(total);
}

}  // namespace

void round_rows(const LinearParams& p, int64_t begin, int64_t end, const IntegerRows& to) {
  const int64_t groups = p.in_features / kGroup;
  with_codes(p.format, [&]<class Codes>() {
    for (int64_t row = begin; row < end; ++row)
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t place = row * groups + g;
        round_block<Codes::kWordCodes>(p.x + row * p.x_stride + g * kGroup, to.words + place * kBlockWords,
                                       to.steps + place * 2);
      }
  });
}

}  // namespace bequest::BEQUEST_ISA
