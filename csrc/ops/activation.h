// Which functions activations are of.
#pragma once

namespace bequest {

// A gate is f(gate) * g(up), where g(up) = up but for the last one: that is gpt-oss' f(x) = x σ(1.702 x) of
// min(gate, 7), and g(up) = 1 + up, cut off at -7 and 7.
enum class Activation { kSilu, kGeluErf, kGeluTanh, kRelu, kClampedSwish };

inline constexpr float kClampedSwishLimit = 7.0f;
inline constexpr float kClampedSwishSlope = 1.702f;

}  // namespace bequest
