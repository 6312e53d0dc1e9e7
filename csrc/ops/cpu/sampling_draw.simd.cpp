#include "ops/cpu/sampling_draw.h"

#include "core/philox.h"
#include "core/shuffle.h"
#include "ops/cpu/vocab_vector.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace bequest::BEQUEST_ISA {
namespace {

struct Product {
  VecU high;
  VecU low;
};

// The 64-bit products of the lanes of `a` with `multiplier`.
inline Product multiply_wide(VecU a, uint32_t multiplier) {
#if defined(BEQUEST_ISA_avx512)
  // Shifts by operator and a product under a full mask: GCC 12 warns about the plain intrinsics' own code.
  typedef uint64_t VecL __attribute__((vector_size(64)));
  const __m512i m = _mm512_set1_epi32(static_cast<int>(multiplier));
  const __mmask8 all = 0xff;
  const auto even = (VecL)_mm512_maskz_mul_epu32(all, (__m512i)a, m);
  const auto odd = (VecL)_mm512_maskz_mul_epu32(all, (__m512i)((VecL)a >> 32), m);
  return {(VecU)_mm512_mask_blend_epi32(0xAAAA, (__m512i)(even >> 32), (__m512i)odd),
          (VecU)_mm512_mask_blend_epi32(0xAAAA, (__m512i)even, (__m512i)(odd << 32))};
#elif defined(BEQUEST_ISA_avx2)
  const __m256i m = _mm256_set1_epi32(static_cast<int>(multiplier));
  const __m256i even = _mm256_mul_epu32((__m256i)a, m);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a, 32), m);
  return {(VecU)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA),
          (VecU)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA)};
#else
  const uint32x2_t m = vdup_n_u32(multiplier);
  const uint32x4_t x = (uint32x4_t)a;
  const uint32x4_t low = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(x), m));
  const uint32x4_t high = vreinterpretq_u32_u64(vmull_u32(vget_high_u32(x), m));
  return {(VecU)vuzp2q_u32(low, high), (VecU)vuzp1q_u32(low, high)};
#endif
}

struct PhiloxLanes {
  VecU word[4];
};

// philox4x32({block, position, choice, 0}, seed) in each lane.
inline PhiloxLanes philox_lanes(VecU block, const DrawKey& key) {
  const VecU zero{};
  VecU c0 = block;
  VecU c1 = zero + key.position;
  VecU c2 = zero + key.choice;
  VecU c3 = zero;
  auto key0 = static_cast<uint32_t>(key.seed);
  auto key1 = static_cast<uint32_t>(key.seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const Product p0 = multiply_wide(c0, kPhiloxMultiplier0);
    const Product p1 = multiply_wide(c2, kPhiloxMultiplier1);
    c0 = p1.high ^ c1 ^ key0;
    c2 = p0.high ^ c3 ^ key1;
    c1 = p1.low;
    c3 = p0.low;
    key0 += kPhiloxKeyStep0;
    key1 += kPhiloxKeyStep1;
  }
  return {{c0, c1, c2, c3}};
}

// log x to about 1 ulp, for normal x > 0.
inline VecF log_normal(VecF x) {
  // x = 2^e * m with m in [sqrt(1/2), sqrt(2)): near x = 1 the result is the polynomial alone.
  const VecI bits = (VecI)x;
  const VecI e = (bits - 0x3f3504f3) >> 23;
  const VecF f = (VecF)(bits - (e << 23)) - 1.0f;
  VecF p = broadcast(7.0376836292e-2f);
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  const VecF square = f * f;
  const VecF n = __builtin_convertvector(e, VecF);
  VecF y = p * f * square;
  y = n * -2.12194440e-4f + y;
  y = square * -0.5f + y;
  return n * 0.693359375f + (f + y);
}

// x * inverse_temperature + Gumbel noise from 32 random bits.
inline VecF noisy(VecF x, float inverse_temperature, VecU bits) {
  const VecF uniform = __builtin_convertvector(bits, VecF) * 0x1p-32f + 0x1p-33f;
  const VecF w = min(uniform, broadcast(1.0f - 0x1p-24f));
  const VecF u = 1.0f - w;
  const VecF lost = (1.0f - u) - w;  // what rounding took from u: all of w where it is small
  const VecF exponential = -(log_normal(u) + lost);
  return x * inverse_temperature - log_normal(exponential);
}
// No noise exceeds -log(2^-33); the rest is room for rounding.
constexpr float kMostNoise = 23.0f;

struct Winner {
  VecF score;
  VecI id;

  void offer(VecF score_in, VecI id_in) {
    const VecI wins = (score_in > score) | ((score_in == score) & (id_in < id));
    score = wins ? score_in : score;
    id = wins ? id_in : id;
  }
};

inline Winner no_winner() { return {broadcast(-kInfinity), VecI{} + INT32_MAX}; }

inline int32_t best_lane(const Winner& w) {
  float score = w.score[0];
  int32_t id = w.id[0];
  for (int i = 1; i < kLanes; ++i) {
    if (w.score[i] > score || (w.score[i] == score && w.id[i] < id)) {
      score = w.score[i];
      id = w.id[i];
    }
  }
  return id;
}

inline VecI lane_numbers() {
  VecI lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  return lane;
}

// A chunk is one philox block per lane: 4 * kLanes consecutive tokens.
constexpr int kChunk = 4 * kLanes;

struct InTokenOrder {
  VecU bits[4];
};

// Lane b of word i belongs to token 4 * b + i.
inline InTokenOrder in_token_order(const PhiloxLanes& random) {
  const auto word = [&](int i) { return (VecF)random.word[i]; };
  const VecF even_low = interleave_low(word(0), word(2));
  const VecF even_high = interleave_high(word(0), word(2));
  const VecF odd_low = interleave_low(word(1), word(3));
  const VecF odd_high = interleave_high(word(1), word(3));
  return {{(VecU)interleave_low(even_low, odd_low), (VecU)interleave_high(even_low, odd_low),
           (VecU)interleave_low(even_high, odd_high), (VecU)interleave_high(even_high, odd_high)}};
}

class RowDraw {
 public:
  RowDraw(const float* x, int64_t n, float inverse_temperature, Cutoff cutoff, const DrawKey& key)
      : x_(x), n_(n), inverse_temperature_(inverse_temperature), cutoff_(cutoff), key_(key) {}

  int32_t run(int32_t best_id) {
    // The likeliest token first: its score rules out most chunks before any noise is made for them.
    const int64_t likeliest = best_id / kChunk * kChunk;
    offer_chunk(likeliest);
    for (int64_t begin = 0; begin < n_; begin += kChunk)
      if (begin != likeliest && can_win(begin)) offer_chunk(begin);
    return best_lane(winner_);
  }

 private:
  VecF at(int64_t i) const { return i + kLanes <= n_ ? load(x_ + i) : load_tail(x_, i, n_); }

  bool can_win(int64_t begin) const {
    const VecF most =
        max(max(at(begin), at(begin + kLanes)), max(at(begin + 2 * kLanes), at(begin + 3 * kLanes)));
    return lane_bits((most >= cutoff_.value) & (most * inverse_temperature_ + kMostNoise >= best_)) != 0;
  }

  void offer_chunk(int64_t begin) {
    const VecI lane = lane_numbers();
    const PhiloxLanes random = philox_lanes((VecU)lane + static_cast<uint32_t>(begin / 4), key_);
    const InTokenOrder words = in_token_order(random);
    for (int v = 0; v < 4; ++v) {
      const VecI id = lane + static_cast<int32_t>(begin + v * kLanes);
      const VecF x = at(begin + v * kLanes);
      const VecI kept = (x > cutoff_.value) | ((x == cutoff_.value) & (id <= cutoff_.last_id));
      winner_.offer(kept ? noisy(x, inverse_temperature_, words.bits[v]) : broadcast(-kInfinity), id);
    }
    best_ = largest_lane(winner_.score);
  }

  const float* x_;
  const int64_t n_;
  const float inverse_temperature_;
  const Cutoff cutoff_;
  const DrawKey key_;
  Winner winner_ = no_winner();
  float best_ = -kInfinity;
};

}  // namespace

int32_t draw(const float* x, int64_t n, float inverse_temperature, Cutoff cutoff, int32_t best_id,
             const DrawKey& key) {
  return RowDraw(x, n, inverse_temperature, cutoff, key).run(best_id);
}

int32_t draw_from(const Candidate* candidates, int64_t n, float inverse_temperature, const DrawKey& key) {
  Winner winner = no_winner();
  for (int64_t begin = 0; begin < n; begin += kLanes) {
    VecF x = broadcast(-kInfinity);
    VecI id = VecI{} + INT32_MAX;
    for (int64_t i = 0; i < kLanes && begin + i < n; ++i) {
      x[i] = candidates[begin + i].value;
      id[i] = candidates[begin + i].id;
    }
    const PhiloxLanes random = philox_lanes((VecU)id >> 2, key);
    const VecI word = id & 3;
    const VecU bits = word == 0   ? random.word[0]
                      : word == 1 ? random.word[1]
                      : word == 2 ? random.word[2]
                                  : random.word[3];
    winner.offer(noisy(x, inverse_temperature, bits), id);
  }
  return best_lane(winner);
}

}  // namespace bequest::BEQUEST_ISA
