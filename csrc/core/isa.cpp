#include "core/isa.h"

#include <cstdlib>
#include <cstring>
#include <string>

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace bequest {
namespace {

#if defined(__x86_64__)
// Tiles are 8 KiB more to save per thread, so Linux gives them to a process that asks for them and has room
// for them on every signal stack.
bool may_use_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

Isa best() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c") ||
      !__builtin_cpu_supports("bmi2"))
    fail("this CPU has no AVX2, FMA, F16C and BMI2, which Bequest needs on x86-64");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!avx512) return Isa::kAvx2;
  const bool amx = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
                   __builtin_cpu_supports("avx512bf16");
  return amx && may_use_tiles() ? Isa::kAmx : Isa::kAvx512;
#else
  return Isa::kNeon;
#endif
}

Isa detect() {
  const Isa isa = best();
  const char* wish = std::getenv("BEQUEST_ISA");
  if (!wish || std::strcmp(wish, isa_name(isa)) == 0) return isa;
  // On x86-64 each set contains those before it.
  for (const Isa lesser : {Isa::kAvx2, Isa::kAvx512})
    if (isa != Isa::kNeon && lesser < isa && std::strcmp(wish, isa_name(lesser)) == 0) return lesser;
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
    case Isa::kAmx:
      return "amx";
    case Isa::kNeon:
      return "neon";
  }
  fail("unknown instruction set");
}

}  // namespace bequest
