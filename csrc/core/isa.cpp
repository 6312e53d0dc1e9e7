#include "core/isa.h"

#include <cstdlib>
#include <cstring>

namespace bequest {
namespace {

Isa detect() {
#if defined(__x86_64__)
  const char* wish = std::getenv("BEQUEST_ISA");
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!avx2) fail("this CPU has no AVX2 and FMA, which Bequest needs on x86-64");
  if (wish && std::strcmp(wish, "avx2") == 0) return Isa::kAvx2;
  if (wish && std::strcmp(wish, "avx512") == 0 && !avx512) fail("BEQUEST_ISA=avx512, but this CPU lacks it");
  return avx512 ? Isa::kAvx512 : Isa::kAvx2;
#else
  return Isa::kNeon;
#endif
}

}  // namespace

Isa current_isa() {
  static const Isa isa = detect();
  return isa;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kNeon:
      return "neon";
  }
  fail("unknown instruction set");
}

}  // namespace bequest
