// Weights of the softmax on NEON, for *.simd.cpp files: the largest of a row's scores, and e^x of four
// vectors side by side. One vector is a chain of some 45 cycles in 18 instructions. The chip does not look
// far enough ahead to overlap such chains where they stand one after another.
#pragma once

#include "attention/cpu/key_rows.h"
#include "core/simd.h"

namespace bequest::BEQUEST_ISA {

// A constant in all lanes.
struct alignas(16) InAllLanes {
  float lanes[kLanes];
  constexpr InAllLanes(float x) : lanes{x, x, x, x} {}
};

// 1.5 * 2^23 + 127: adding it rounds to an integer in the low bits, which is the bits of a float's exponent.
inline constexpr float kExponentShift = 12583039.0f;

// What a multiply-add of exp_nonpositive adds to.
inline constexpr InAllLanes kExpTerms[] = {kExponentShift, 1.39819995e-3f, 8.33345205e-3f,
                                           4.16657962e-2f, 1.66666657e-1f, 5.00000012e-1f};

// terms[i] = of each of N vectors. A multiply-add overwrites what it adds to, and a copy of a constant costs
// as much as a multiply-add; the units that load have time. GCC would load once and copy.
template <int N>
[[gnu::always_inline]] inline void read_term(int i, VecF (&terms)[N]) {
#pragma GCC unroll 4
  for (int v = 0; v < N; ++v) asm volatile("ldr %q0, %1" : "=w"(terms[v]) : "m"(kExpTerms[i]));
}

// sum + a * b, as an instruction: GCC would place it elsewhere and copy what it overwrites.
[[gnu::always_inline]] inline VecF add_product(VecF sum, VecF a, VecF b) {
  VecF result;
  asm("fmla %0.4s, %2.4s, %3.4s" : "=w"(result) : "0"(sum), "w"(a), "w"(b));
  return result;
}

// Keeps the compiler from computing v where it is used, which would keep its operands alive until then.
[[gnu::always_inline]] inline VecI compute_here(VecI v) {
  asm volatile("" : "+w"(v));
  return v;
}

// x = e^x for x <= 0, to about 1 ulp; 0 below -87.3; NaN is kept. What is computed below -87.3 is anything.
template <int N>
[[gnu::always_inline]] inline void exp_nonpositive(VecF (&x)[N]) {
  const auto each = [](auto f) {
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) f(v);
  };
  VecI low[N], power[N];
  VecF n[N], p[N], next[N];
  read_term(0, next);
  each([&](int v) { low[v] = compute_here(x[v] < broadcast(-87.3365f)); });
  each([&](int v) { next[v] = add_product(next[v], x[v], broadcast(1.44269504f)); });
  each([&](int v) { n[v] = next[v] - broadcast(kExponentShift); });
  each([&](int v) { power[v] = compute_here((VecI)next[v] << 23); });  // the bits of 2^n
  each([&](int v) { x[v] = add_product(x[v], n[v], broadcast(-0.693145752f)); });
  read_term(1, p);
  each([&](int v) { x[v] = add_product(x[v], n[v], broadcast(-1.42860677e-6f)); });
  read_term(2, next);
  each([&](int v) { p[v] = add_product(p[v], x[v], broadcast(1.98756915e-4f)); });
#pragma GCC unroll 4
  for (int i = 2; i < 6; ++i) {
    each([&](int v) { p[v] = add_product(next[v], p[v], x[v]); });
    if (i < 5) read_term(i + 1, next);
  }
  each([&](int v) { next[v] = x[v] * x[v]; });
  each([&](int v) { x[v] = x[v] + 1.0f; });
  each([&](int v) { x[v] = add_product(x[v], p[v], next[v]); });
  each([&](int v) { x[v] = x[v] * (VecF)power[v]; });
  each([&](int v) { x[v] = (VecF)((VecI)x[v] & ~low[v]); });
}

inline VecF exp_nonpositive(VecF x) {
  VecF one[1] = {x};
  exp_nonpositive(one);
  return one[0];
}

// scores = exp(scores - m) in `computed` (whole vectors); the sums of their lanes.
inline VecF weigh_row(float* scores, KeyRange computed, float largest) {
  const VecF m = broadcast(largest);
  VecF sum = {};
  const auto weigh = [&]<int N>(float* at) {
    VecF weights[N];
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) weights[v] = load(at + v * kLanes) - m;
    exp_nonpositive(weights);
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) {
      vst1q_f32(at + v * kLanes, (float32x4_t)weights[v]);
      sum += weights[v];
    }
  };
  int j = computed.begin;
  for (; j + 4 * kLanes <= computed.end; j += 4 * kLanes) weigh.template operator()<4>(scores + j);
  for (; j < computed.end; j += kLanes) weigh.template operator()<1>(scores + j);
  return sum;
}

// The largest number in `computed` (whole vectors). NaN is passed over: its weight shows it.
inline float largest_score(const float* scores, KeyRange computed) {
  VecF best[4];
  for (VecF& b : best) b = broadcast(-__builtin_inff());
  int j = computed.begin;
  for (; j + 4 * kLanes <= computed.end; j += 4 * kLanes)
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) best[v] = (VecF)vmaxnmq_f32(best[v], load(scores + j + v * kLanes));
  for (; j < computed.end; j += kLanes) best[0] = (VecF)vmaxnmq_f32(best[0], load(scores + j));
  return vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(best[0], best[1]), vmaxnmq_f32(best[2], best[3])));
}

}  // namespace bequest::BEQUEST_ISA
