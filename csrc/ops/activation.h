// Which functions activations are of.
#pragma once

namespace bequest {

enum class Activation { kSilu, kGeluErf, kGeluTanh, kRelu };

}  // namespace bequest
