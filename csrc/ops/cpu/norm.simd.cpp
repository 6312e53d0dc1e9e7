#include "ops/cpu/norm.h"

#include "core/simd.h"
#include "core/threads.h"
#include "ops/cpu/hidden_tap.h"

namespace bequest::BEQUEST_ISA {
namespace {

// fold(sum, x) over a row. Four chains hide the latency of the add; their number fixes the order of
// summation.
template <class Fold>
float sum_row(const float* x, int64_t n, Fold fold) {
  VecF sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) sums[j] = fold(sums[j], load(x + i + j * kLanes));
  for (; i + kLanes <= n; i += kLanes) sums[0] = fold(sums[0], load(x + i));
  float sum = reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < n; ++i) sum = fold(sum, x[i]);
  return sum;
}

// out = f(at) along a row, where at(row) are the elements of another row at the same places.
template <class F>
void make_row(float* out, int64_t n, F f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, f([i](const float* row) { return load(row + i); }));
  for (; i < n; ++i) out[i] = f([i](const float* row) { return row[i]; });
}

float inverse_deviation(float squares, int64_t n, float eps) {
  return 1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps);
}

// What the two norms do with a row; x and out may be the same.

struct RmsRow {
  const float* weight;
  float eps;

  void operator()(const float* x, float* out, int64_t n) const {
    const float squares = sum_row(x, n, [](auto sum, auto v) { return v * v + sum; });
    const float scale = inverse_deviation(squares, n, eps);
    make_row(out, n, [&](auto at) { return at(weight) * (at(x) * scale); });
  }
};

struct LayerRow {
  const float* weight;
  const float* bias;
  float eps;

  void operator()(const float* x, float* out, int64_t n) const {
    const float mean = sum_row(x, n, [](auto sum, auto v) { return sum + v; }) / static_cast<float>(n);
    const float squares = sum_row(x, n, [mean](auto sum, auto v) {
      const auto centred = v - mean;
      return centred * centred + sum;
    });
    const float scale = inverse_deviation(squares, n, eps);
    make_row(out, n, [&](auto at) { return (at(x) - mean) * scale * at(weight) + at(bias); });
  }
};

void add_to(float* sum, const float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += x[i];
}

// Rows of a chunk: enough work that a second thread pays for its wake-up.
int64_t rows_per_chunk(int64_t row_size) { return 1 + 16384 / row_size; }

// Adds to the residual, taps and norms the rows of p.
template <class Params, class NormRow>
void norm_rows(const Params& p, NormRow norm_row) {
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
      norm_row(x, out, p.hidden);
      if (tapped && p.tap.store_output) __builtin_memcpy(tapped, out, p.hidden * sizeof(float));
    }
  });
}

}  // namespace

void rms_norm(const RmsNormParams& p) { norm_rows(p, RmsRow{p.weight, p.eps}); }

void layer_norm(const LayerNormParams& p) { norm_rows(p, LayerRow{p.weight, p.bias, p.eps}); }

void head_rms_norm(const HeadRmsNormParams& p) {
  const RmsRow norm_row{p.weight, p.eps};
  const int64_t grain = rows_per_chunk(p.num_heads * p.head_dim + 1);
  parallel_for(p.num_tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < p.num_heads; ++h) {
        float* head = p.x + t * p.row_stride + h * p.head_dim;
        norm_row(head, head, p.head_dim);
      }
    }
  });
}

}  // namespace bequest::BEQUEST_ISA
