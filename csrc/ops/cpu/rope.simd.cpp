#include "ops/cpu/rope.h"

#include "core/simd.h"
#include "core/threads.h"

namespace bequest::BEQUEST_ISA {
namespace {

void rotate_head(float* head, const float* cos, const float* sin, int64_t half) {
  float* first = head;
  float* second = head + half;
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const VecF a = load(first + i), b = load(second + i);
    const VecF c = load(cos + i), s = load(sin + i);
    store(first + i, a * c - b * s);
    store(second + i, b * c + a * s);
  }
  for (; i < half; ++i) {
    const float a = first[i], b = second[i];
    first[i] = a * cos[i] - b * sin[i];
    second[i] = b * cos[i] + a * sin[i];
  }
}

void scale(float* row, float factor, int64_t count) {
  for (int64_t i = 0; i < count; ++i) row[i] *= factor;
}

}  // namespace

void rotary(const RotaryParams& p) {
  const int64_t half = p.rotary_dim / 2;
  const int64_t grain = 1 + 8192 / ((p.q_heads + p.k_heads) * p.rotary_dim + 1);
  parallel_for(p.num_tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* cos = p.cos_sin + p.positions[t] * p.rotary_dim;
      const float* sin = cos + half;
      float* const q = p.q + t * p.q_stride;
      for (int64_t h = 0; h < p.q_heads; ++h) rotate_head(q + h * p.head_dim, cos, sin, half);
      if (p.query_scales != nullptr) scale(q, p.query_scales[p.positions[t]], p.q_heads * p.head_dim);
      for (int64_t h = 0; h < p.k_heads; ++h)
        rotate_head(p.k + t * p.k_stride + h * p.head_dim, cos, sin, half);
    }
  });
}

}  // namespace bequest::BEQUEST_ISA
