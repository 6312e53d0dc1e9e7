// Integer dot products, of which a chip may have several kinds beside its vectors of floats. A `foo.dot.cpp`
// is compiled once per kind, its functions in a namespace of that name; `foo.cpp` declares and dispatches
// them as core/isa.h says of instruction sets. All kinds give the same bits: integers have no rounding.
//
//   avx2, avx512        products of pairs of 16 bits, added in an instruction of its own
//   avxvnni, avx512vnni the same in one instruction
//   neon                multiply-adds of 32 bits
//   dotprod             products of quads of 8 bits, so that a value of 16 bits takes two (aarch64)
#pragma once

#include "core/check.h"

namespace bequest {

enum class Dot { kAvx2, kAvxVnni, kAvx512, kAvx512Vnni, kNeon, kDotprod };

// The best kind that this chip has and BEQUEST_ISA and BEQUEST_DOT (environment variables, for tests) allow.
Dot current_dot();
const char* dot_name(Dot dot);

// Whether it multiplies and adds in one instruction, so that products of integers are faster than those of
// floats in every batch.
bool is_fused(Dot dot);

}  // namespace bequest

#if defined(__x86_64__)
#define BEQUEST_DECLARE_PER_DOT(...) \
  namespace avx2 {                   \
  __VA_ARGS__;                       \
  }                                  \
  namespace avxvnni {                \
  __VA_ARGS__;                       \
  }                                  \
  namespace avx512 {                 \
  __VA_ARGS__;                       \
  }                                  \
  namespace avx512vnni {             \
  __VA_ARGS__;                       \
  }
#define BEQUEST_DISPATCH_DOT(...)                  \
  do {                                             \
    switch (::bequest::current_dot()) {            \
      case Dot::kAvxVnni:                          \
        return ::bequest::avxvnni::__VA_ARGS__;    \
      case Dot::kAvx512:                           \
        return ::bequest::avx512::__VA_ARGS__;     \
      case Dot::kAvx512Vnni:                       \
        return ::bequest::avx512vnni::__VA_ARGS__; \
      default:                                     \
        return ::bequest::avx2::__VA_ARGS__;       \
    }                                              \
  } while (false)
#else
#define BEQUEST_DECLARE_PER_DOT(...) \
  namespace neon {                   \
  __VA_ARGS__;                       \
  }                                  \
  namespace dotprod {                \
  __VA_ARGS__;                       \
  }
#define BEQUEST_DISPATCH_DOT(...)                                                          \
  do {                                                                                     \
    if (::bequest::current_dot() == Dot::kDotprod) return ::bequest::dotprod::__VA_ARGS__; \
    return ::bequest::neon::__VA_ARGS__;                                                   \
  } while (false)
#endif
