#include "ops/cpu/vocab_scan.h"

#include "ops/cpu/vocab_vector.h"

namespace bequest::BEQUEST_ISA {
namespace {

// Lane sums in float lose digits over a large vocabulary: they move to double after this many vectors.
constexpr int kVectorsPerSum = 128;

}  // namespace

RowMax scan_max(const float* x, int64_t n) {
  constexpr int kUnroll = 4;  // independent chains hide the latency
  VecF best[kUnroll];
  VecI broken{};
  for (auto& b : best) b = broadcast(-kInfinity);
  int64_t i = 0;
  for (; i + kUnroll * kLanes <= n; i += kUnroll * kLanes) {
    for (int u = 0; u < kUnroll; ++u) {
      const VecF v = load(x + i + u * kLanes);
      best[u] = max(best[u], v);
      broken |= v != v;
    }
  }
  for_each_vector(x + i, n - i, [&](VecF v, int64_t) {
    best[0] = max(best[0], v);
    broken |= v != v;
  });
  const float m = reduce_max(max(max(best[0], best[1]), max(best[2], best[3])));
  return {m, lane_bits(broken) == 0 && m > -kInfinity && m < kInfinity};
}

int32_t find_first(const float* x, int64_t n, float value) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const uint32_t bits = lane_bits(load(x + i) == broadcast(value));
    if (bits != 0) return static_cast<int32_t>(i) + __builtin_ctz(bits);
  }
  while (x[i] != value) ++i;
  return static_cast<int32_t>(i);
}

double sum_exp(const float* x, int64_t n, float max, float inverse_temperature, float floor) {
  constexpr int64_t kChunk = int64_t{kVectorsPerSum} * kLanes;
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kChunk) {
    VecF sum{};
    for_each_vector(x + begin, n - begin < kChunk ? n - begin : kChunk, [&](VecF v, int64_t) {
      const VecF weight = exp((v - max) * inverse_temperature);
      sum += v >= floor ? weight : VecF{};
    });
    total += reduce_add(sum);
  }
  return total;
}

int64_t count_greater(const float* x, int64_t n, float value) {
  VecI count{};
  for_each_vector(x, n, [&](VecF v, int64_t) { count -= v > value; });
  int64_t total = 0;
  for (int i = 0; i < kLanes; ++i) total += count[i];
  return total;
}

int64_t set_maxima(const float* x, int64_t n, int64_t set_size, float* maxima) {
  const int64_t span = set_size * kLanes;
  int64_t count = 0;
  for (int64_t begin = 0; begin < n; begin += span) {
    VecF best = broadcast(-kInfinity);
    for_each_vector(x + begin, n - begin < span ? n - begin : span,
                    [&](VecF v, int64_t) { best = max(best, v); });
    store(maxima + count, best);
    count += kLanes;
  }
  return count;
}

int64_t collect(const float* x, int64_t n, float lower, float upper, Candidate* out) {
  int64_t count = 0;
  for_each_vector(x, n, [&](VecF v, int64_t i) {
    for (uint32_t bits = lane_bits((v >= lower) & (v < upper)); bits != 0; bits &= bits - 1) {
      const int64_t at = i + __builtin_ctz(bits);
      if (at < n) out[count++] = {x[at], static_cast<int32_t>(at)};  // lower may be -inf, like the padding
    }
  });
  return count;
}

void measure_mass(const float* x, int64_t n, float max, float inverse_temperature, MassLevels& levels) {
  constexpr int64_t kChunk = int64_t{kVectorsPerSum} * kLanes;
  for (int l = 0; l < kMassLevels; ++l) levels.mass[l] = levels.count[l] = 0;
  for (int64_t begin = 0; begin < n; begin += kChunk) {
    VecF mass[kMassLevels] = {};
    VecI count[kMassLevels] = {};
    for_each_vector(x + begin, n - begin < kChunk ? n - begin : kChunk, [&](VecF v, int64_t) {
      const VecF weight = exp((v - max) * inverse_temperature);
      for (int l = 0; l < kMassLevels; ++l) {
        mass[l] += v >= levels.level[l] ? weight : VecF{};
        count[l] -= v >= levels.level[l];
      }
    });
    for (int l = 0; l < kMassLevels; ++l) {
      levels.mass[l] += reduce_add(mass[l]);
      for (int i = 0; i < kLanes; ++i) levels.count[l] += count[l][i];
    }
  }
}

}  // namespace bequest::BEQUEST_ISA
