#include "core/dot.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "core/isa.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace bequest {
namespace {

constexpr Dot kAll[] = {Dot::kAvx2, Dot::kAvxVnni, Dot::kAvx512, Dot::kAvx512Vnni, Dot::kNeon, Dot::kDotprod};

bool has(Dot dot) {
#if defined(__x86_64__)
  const bool wide = current_isa() != Isa::kAvx2;  // what BEQUEST_ISA forbids is not there
  switch (dot) {
    case Dot::kAvx2:
      return true;
    case Dot::kAvxVnni:
      return __builtin_cpu_supports("avxvnni");
    case Dot::kAvx512:
      return wide;
    case Dot::kAvx512Vnni:
      return wide && __builtin_cpu_supports("avx512vnni");
    default:
      return false;
  }
#else
  constexpr unsigned long kDotprod = 1ul << 20;  // HWCAP_ASIMDDP
  return dot == Dot::kNeon || (dot == Dot::kDotprod && (getauxval(AT_HWCAP) & kDotprod) != 0);
#endif
}

Dot detect() {
  const char* const wish = std::getenv("BEQUEST_DOT");
  Dot best = kAll[0];
  for (const Dot dot : kAll) {
    if (!has(dot)) continue;
    best = dot;  // each contains those before it
    if (wish && std::strcmp(wish, dot_name(dot)) == 0) return dot;
  }
  if (wish) fail(std::string("BEQUEST_DOT=") + wish + ", but this CPU's dot products are " + dot_name(best));
  return best;
}

}  // namespace

Dot current_dot() {
  static const Dot dot = detect();
  return dot;
}

bool is_fused(Dot dot) { return dot == Dot::kAvxVnni || dot == Dot::kAvx512Vnni || dot == Dot::kDotprod; }

const char* dot_name(Dot dot) {
  switch (dot) {
    case Dot::kAvx2:
      return "avx2";
    case Dot::kAvxVnni:
      return "avxvnni";
    case Dot::kAvx512:
      return "avx512";
    case Dot::kAvx512Vnni:
      return "avx512vnni";
    case Dot::kNeon:
      return "neon";
    case Dot::kDotprod:
      return "dotprod";
  }
  fail("unknown dot products");
}

}  // namespace bequest
