// Activations of sums of bfloat16 products, for *.amx.cpp files. What they give is rounded to bfloat16, 2^-9,
// by the product that follows, so 2^-13 of their own is enough, and takes a third of the time: division is a
// table of the chip, and polynomials are short. Each is f(x) with x as a factor, so that a NaN stays one.
#pragma once

#include "core/simd.h"
#include "ops/activation.h"

namespace bequest::amx {
namespace {

// GCC 12 warns of the unmasked intrinsics.
inline VecF reciprocal(VecF x) { return (VecF)_mm512_maskz_rcp14_ps(0xffff, x); }

// 2^x to 2^-18, but no less than 2^-100: products with subnormal numbers take the chip a hundred times as
// long.
inline VecF exp2(VecF x) {
  x = max(x, broadcast(-100.0f));
  const VecF f = (VecF)_mm512_maskz_reduce_ps(0xffff, x, _MM_FROUND_TO_NEG_INF);  // x - floor(x)
  VecF p = broadcast(0.0135340961f);
  p = p * f + 0.0520116054f;
  p = p * f + 0.241442665f;
  p = p * f + 0.693003833f;
  p = p * f + 1.00000262f;
  return (VecF)_mm512_maskz_scalef_ps(0xffff, p, x);  // p · 2^floor(x)
}

// What a gate multiplies by, of most activations.
struct UpItself {
  static VecF factor(VecF up) { return up; }
};

struct QuickSilu : UpItself {
  static VecF apply(VecF x) { return x * reciprocal(exp2(-1.44269504f * x) + 1.0f); }
};

// 0.5 x (1 + tanh(u)) is x times the logistic function of 2u.
struct QuickGeluTanh : UpItself {
  static VecF apply(VecF x) {
    const VecF u = x * (0.102943240f * x * x + 2.30220820f);  // 2u / log 2
    return x * reciprocal(exp2(-u) + 1.0f);
  }
};

// x Φ(x) with Φ(-|x|) = e^(-x² / 2) t Q(t), where t = 1 / (1 + 0.332 |x|) and Q is a minimax polynomial.
struct QuickGeluErf : UpItself {
  static VecF apply(VecF x) {
    const VecF t = reciprocal((VecF)((VecU)x & 0x7fffffffu) * 0.332340187f + 1.0f);
    VecF q = broadcast(-0.0537019372f);
    q = q * t + 0.0833928362f;
    q = q * t + 0.0938435048f;
    q = q * t + 0.109074332f;
    q = q * t + 0.135002211f;
    q = q * t + 0.132380515f;
    const VecF tail = q * t * exp2(-0.721347520f * x * x);
    return x * (x < 0.0f ? tail : 1.0f - tail);
  }
};

struct QuickRelu : UpItself {
  static VecF apply(VecF x) { return x < 0.0f ? VecF{} : x; }
};

struct QuickClampedSwish {
  static VecF apply(VecF x) {
    const VecF low = x > kClampedSwishLimit ? broadcast(kClampedSwishLimit) : x;
    return low * reciprocal(exp2(-1.44269504f * kClampedSwishSlope * low) + 1.0f);
  }
  static VecF factor(VecF up) {
    const VecF low = up > kClampedSwishLimit ? broadcast(kClampedSwishLimit) : up;
    return (low < -kClampedSwishLimit ? broadcast(-kClampedSwishLimit) : low) + 1.0f;
  }
};

// f<F>() for the functions of an activation.
template <class F>
void with_quick_activation(Activation activation, F f) {
  switch (activation) {
    case Activation::kSilu:
      return f.template operator()<QuickSilu>();
    case Activation::kGeluErf:
      return f.template operator()<QuickGeluErf>();
    case Activation::kGeluTanh:
      return f.template operator()<QuickGeluTanh>();
    case Activation::kRelu:
      return f.template operator()<QuickRelu>();
    case Activation::kClampedSwish:
      return f.template operator()<QuickClampedSwish>();
  }
  fail("unknown activation");
}

}  // namespace
}  // namespace bequest::amx
