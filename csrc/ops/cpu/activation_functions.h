// Activations on vectors and rows, for *.simd.cpp files.
#pragma once

#include "core/simd.h"
#include "ops/cpu/activation.h"

namespace bequest::BEQUEST_ISA {
namespace {

// What a gate multiplies by, of most activations.
struct UpItself {
  static VecF factor(VecF up) { return up; }
};

// Each is f(x) with x as the last factor, so that a NaN stays one.
struct Silu : UpItself {
  static VecF apply(VecF x) { return x / (exp(-x) + 1.0f); }
};

// 0.5 x (1 + tanh(u)) is x times the logistic function of 2u.
struct GeluTanh : UpItself {
  static VecF apply(VecF x) {
    const VecF u = 0.797884561f * (x + 0.044715f * x * x * x);
    return x / (exp(-2.0f * u) + 1.0f);
  }
};

// x Φ(x) with Φ(-|x|) = erfc(z) / 2 = e^(-z²) t Q(t) / 2, where z = |x| / √2, t = 1 / (1 + 0.3 z) and Q is
// the minimax polynomial of e^(z²) erfc(z) / t, relative error 2e-8. Keeps its relative precision in the left
// tail.
struct GeluErf : UpItself {
  static VecF apply(VecF x) {
    const VecF z = (x < 0.0f ? -x : x) * 0.707106781f;
    const VecF t = 1.0f / (0.3f * z + 1.0f);
    VecF q = broadcast(-0.129523139f);
    q = q * t + 0.485564416f;
    q = q * t - 0.51228074f;
    q = q * t + 0.547723274f;
    q = q * t - 0.0946531389f;
    q = q * t + 0.214927172f;
    q = q * t + 0.14833886f;
    q = q * t + 0.170715275f;
    q = q * t + 0.169188002f;
    const VecF tail = 0.5f * q * t * exp(-z * z);
    return x * (x < 0.0f ? tail : 1.0f - tail);
  }
};

struct Relu : UpItself {
  static VecF apply(VecF x) { return x < 0.0f ? VecF{} : x; }
};

struct ClampedSwish {
  static VecF apply(VecF x) {
    const VecF low = x > kClampedSwishLimit ? broadcast(kClampedSwishLimit) : x;
    return low / (exp(-kClampedSwishSlope * low) + 1.0f);
  }
  static VecF factor(VecF up) {
    const VecF low = up > kClampedSwishLimit ? broadcast(kClampedSwishLimit) : up;
    return (low < -kClampedSwishLimit ? broadcast(-kClampedSwishLimit) : low) + 1.0f;
  }
};

// f<F>() for the functions of an activation.
template <class F>
void with_activation(Activation activation, F f) {
  switch (activation) {
    case Activation::kSilu:
      return f.template operator()<Silu>();
    case Activation::kGeluErf:
      return f.template operator()<GeluErf>();
    case Activation::kGeluTanh:
      return f.template operator()<GeluTanh>();
    case Activation::kRelu:
      return f.template operator()<Relu>();
    case Activation::kClampedSwish:
      return f.template operator()<ClampedSwish>();
  }
  fail("unknown activation");
}

// out [n] = F(gate) * F's factor of up
template <class F>
void gate_row(const float* gate, const float* up, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, F::apply(load(gate + i)) * F::factor(load(up + i)));
  if (i == n) return;
  float last_gate[kLanes] = {}, last_up[kLanes] = {};
  const size_t bytes = (n - i) * sizeof(float);
  std::memcpy(last_gate, gate + i, bytes);
  std::memcpy(last_up, up + i, bytes);
  store(last_gate, F::apply(load(last_gate)) * F::factor(load(last_up)));
  std::memcpy(out + i, last_gate, bytes);
}

// x [n] = F(x)
template <class F>
void apply_row(float* x, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(x + i, F::apply(load(x + i)));
  if (i == n) return;
  float last[kLanes] = {};
  const size_t bytes = (n - i) * sizeof(float);
  std::memcpy(last, x + i, bytes);
  store(last, F::apply(load(last)));
  std::memcpy(x + i, last, bytes);
}

}  // namespace
}  // namespace bequest::BEQUEST_ISA
