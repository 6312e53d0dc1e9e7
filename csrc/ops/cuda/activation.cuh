// Activations of one float, for kernels that apply them on the way.
#pragma once

#include "ops/activation.h"

namespace bequest::cuda {

template <Activation kActivation>
__device__ __forceinline__ float activate(float x) {
  if constexpr (kActivation == Activation::kSilu) {
    return x / (1.0f + __expf(-x));
  } else if constexpr (kActivation == Activation::kGeluErf) {
    return 0.5f * x * (1.0f + erff(x * 0.70710678f));
  } else if constexpr (kActivation == Activation::kRelu) {
    return x < 0.0f ? 0.0f : x;  // NaN stays
  } else if constexpr (kActivation == Activation::kClampedSwish) {
    const float low = x > kClampedSwishLimit ? kClampedSwishLimit : x;
    return low / (1.0f + __expf(-kClampedSwishSlope * low));
  } else {
    // tanh by exp: fast math's own tanh is good to 11 bits only.
    const float inner = 0.79788456f * (x + 0.044715f * x * x * x);
    return x - x / (1.0f + __expf(2.0f * inner));
  }
}

// What a gate multiplies by.
template <Activation kActivation>
__device__ __forceinline__ float factor(float up) {
  if constexpr (kActivation == Activation::kClampedSwish) {
    const float low = up > kClampedSwishLimit ? kClampedSwishLimit : up;
    return (low < -kClampedSwishLimit ? -kClampedSwishLimit : low) + 1.0f;
  } else {
    return up;
  }
}

// The same where the choice is data.
__device__ __forceinline__ float activate(Activation activation, float x) {
  switch (activation) {
    case Activation::kSilu:
      return activate<Activation::kSilu>(x);
    case Activation::kGeluErf:
      return activate<Activation::kGeluErf>(x);
    case Activation::kRelu:
      return activate<Activation::kRelu>(x);
    case Activation::kGeluTanh:
      return activate<Activation::kGeluTanh>(x);
    case Activation::kClampedSwish:
      return activate<Activation::kClampedSwish>(x);
  }
  return x;
}

// Out of the way of the code that every step fetches.
[[maybe_unused]] static __device__ __noinline__ float rarely_gate(Activation activation, float x, float up) {
  const bool clamped = activation == Activation::kClampedSwish;
  return activate(activation, x) * (clamped ? factor<Activation::kClampedSwish>(up) : up);
}

__device__ __forceinline__ float gate(Activation activation, float x, float up) {
  if (activation == Activation::kSilu) return activate<Activation::kSilu>(x) * up;
  return rarely_gate(activation, x, up);
}

}  // namespace bequest::cuda
