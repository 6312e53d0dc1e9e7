// Run-time choice of the instruction set. A `foo.simd.cpp` is compiled once per set, its functions in
// namespace bequest::avx2, bequest::avx512 or bequest::neon; `foo.cpp` declares and dispatches them:
//
//   BEQUEST_DECLARE_PER_ISA(void rms_norm(const RmsNormParams& p))
//   void rms_norm(const RmsNormParams& p) { BEQUEST_DISPATCH_ISA(rms_norm(p)); }
//
// A chip with matrix units (AMX tiles of bfloat16) has a fourth set, which contains AVX-512. Few kernels are
// worth writing for it: those are `foo.amx.cpp` files, compiled once, in namespace bequest::amx, and called
// where current_isa() is kAmx. Everything else takes the AVX-512 kernels there. core/amx_tiles.h has the
// units.
//
// A .simd.cpp or .amx.cpp must not instantiate templates of the standard library or of shared headers outside
// its own namespace: the linker keeps one copy of an inline function, and it might keep the one with
// instructions this chip lacks.
#pragma once

#include "core/check.h"

namespace bequest {

enum class Isa { kAvx2, kAvx512, kAmx, kNeon };

// The best set that this chip and its kernel have and BEQUEST_ISA (an environment variable, for tests)
// allows. The first call asks the kernel for the tiles, for all threads of the process. Throws on a chip that
// has none.
Isa current_isa();
const char* isa_name(Isa isa);

}  // namespace bequest

#if defined(__x86_64__)
#define BEQUEST_DECLARE_PER_ISA(...) \
  namespace avx2 {                   \
  __VA_ARGS__;                       \
  }                                  \
  namespace avx512 {                 \
  __VA_ARGS__;                       \
  }
#define BEQUEST_DISPATCH_ISA(...)                 \
  do {                                            \
    if (::bequest::current_isa() != Isa::kAvx2) { \
      return ::bequest::avx512::__VA_ARGS__;      \
    }                                             \
    return ::bequest::avx2::__VA_ARGS__;          \
  } while (false)
#else
#define BEQUEST_DECLARE_PER_ISA(...) \
  namespace neon {                   \
  __VA_ARGS__;                       \
  }
#define BEQUEST_DISPATCH_ISA(...) return ::bequest::neon::__VA_ARGS__
#endif
