#include "core/isa.h"

#include <cstdlib>
#include <cstring>
#include <string>

namespace bequest {
namespace {

Isa best() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c") ||
      !__builtin_cpu_supports("bmi2"))
    fail("this CPU has no AVX2, FMA, F16C and BMI2, which Bequest needs on x86-64");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx512 ? Isa::kAvx512 : Isa::kAvx2;
#else
  return Isa::kNeon;
#endif
}

Isa detect() {
  const Isa isa = best();
  const char* wish = std::getenv("BEQUEST_ISA");
  if (!wish || std::strcmp(wish, isa_name(isa)) == 0) return isa;
  if (isa == Isa::kAvx512 && std::strcmp(wish, "avx2") == 0) return Isa::kAvx2;
  fail(std::string("BEQUEST_ISA=") + wish + ", but this CPU's instruction set is " + isa_name(isa));
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
