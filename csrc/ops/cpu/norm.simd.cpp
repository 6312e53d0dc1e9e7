#include "ops/cpu/norm.h"

#include "core/simd.h"
#include "core/threads.h"

namespace bequest::BEQUEST_ISA {
namespace {

// Σ (x - mean)². Four chains hide the latency of the add; their number fixes the order of summation.
float sum_of_squares(const float* x, int64_t n, float mean = 0.0f) {
  const VecF means = broadcast(mean);
  VecF sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      const VecF v = load(x + i + j * kLanes) - means;
      sums[j] = v * v + sums[j];
    }
  }
  for (; i + kLanes <= n; i += kLanes) {
    const VecF v = load(x + i) - means;
    sums[0] = v * v + sums[0];
  }
  float sum = reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < n; ++i) sum += (x[i] - mean) * (x[i] - mean);
  return sum;
}

float sum_of(const float* x, int64_t n) {
  VecF sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) sums[j] += load(x + i + j * kLanes);
  for (; i + kLanes <= n; i += kLanes) sums[0] += load(x + i);
  float sum = reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < n; ++i) sum += x[i];
  return sum;
}

// x and out may be the same row.
void centre_and_normalise(const float* x, const float* weight, const float* bias, float* out, int64_t n,
                          float eps) {
  const float mean = sum_of(x, n) / static_cast<float>(n);
  const float scale = 1.0f / __builtin_sqrtf(sum_of_squares(x, n, mean) / static_cast<float>(n) + eps);
  const VecF means = broadcast(mean), scales = broadcast(scale);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    store(out + i, (load(x + i) - means) * scales * load(weight + i) + load(bias + i));
  for (; i < n; ++i) out[i] = (x[i] - mean) * scale * weight[i] + bias[i];
}

// x and out may be the same row.
void normalise(const float* x, const float* weight, float* out, int64_t n, float eps) {
  const float scale = 1.0f / __builtin_sqrtf(sum_of_squares(x, n) / static_cast<float>(n) + eps);
  const VecF scales = broadcast(scale);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(weight + i) * (load(x + i) * scales));
  for (; i < n; ++i) out[i] = weight[i] * (x[i] * scale);
}

void add_to(float* sum, const float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += x[i];
}

// Where the tap wants this token's row, or null.
float* tap_row(const HiddenTap& tap, int64_t token, int64_t hidden) {
  if (!tap.ring_rows || tap.ring_rows[token] < 0) return nullptr;
  const uint64_t low = tap.layers[2 * token], high = tap.layers[2 * token + 1];
  const uint64_t word = tap.layer < 64 ? low : high, bit = uint64_t{1} << (tap.layer % 64);
  if (!(word & bit)) return nullptr;
  const int before =
      __builtin_popcountll(word & (bit - 1)) + (tap.layer < 64 ? 0 : __builtin_popcountll(low));
  return static_cast<float*>(tap.ring) + (tap.ring_rows[token] + before) % tap.num_ring_rows * hidden;
}

// Rows of a chunk: enough work that a second thread pays for its wake-up.
int64_t rows_per_chunk(int64_t row_size) { return 1 + 16384 / row_size; }

}  // namespace

void rms_norm(const RmsNormParams& p) {
  parallel_for(p.num_tokens, rows_per_chunk(p.hidden), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* x = p.x + t * p.hidden;
      if (p.residual) {
        float* residual = p.residual + t * p.hidden;
        add_to(residual, x, p.hidden);
        x = residual;
      }
      float* tapped = tap_row(p.tap, t, p.hidden);
      if (tapped && !p.tap.store_output) __builtin_memcpy(tapped, x, p.hidden * sizeof(float));
      float* out = p.out + t * p.hidden;
      normalise(x, p.weight, out, p.hidden, p.eps);
      if (tapped && p.tap.store_output) __builtin_memcpy(tapped, out, p.hidden * sizeof(float));
    }
  });
}

void layer_norm(const LayerNormParams& p) {
  parallel_for(p.num_tokens, rows_per_chunk(p.hidden), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* x = p.x + t * p.hidden;
      if (p.residual) {
        float* residual = p.residual + t * p.hidden;
        add_to(residual, x, p.hidden);
        x = residual;
      }
      float* tapped = tap_row(p.tap, t, p.hidden);
      if (tapped && !p.tap.store_output) __builtin_memcpy(tapped, x, p.hidden * sizeof(float));
      float* out = p.out + t * p.hidden;
      centre_and_normalise(x, p.weight, p.bias, out, p.hidden, p.eps);
      if (tapped && p.tap.store_output) __builtin_memcpy(tapped, out, p.hidden * sizeof(float));
    }
  });
}

void head_rms_norm(const HeadRmsNormParams& p) {
  const int64_t grain = rows_per_chunk(p.num_heads * p.head_dim + 1);
  parallel_for(p.num_tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < p.num_heads; ++h) {
        float* head = p.x + t * p.row_stride + h * p.head_dim;
        normalise(head, p.weight, head, p.head_dim, p.eps);
      }
    }
  });
}

}  // namespace bequest::BEQUEST_ISA
