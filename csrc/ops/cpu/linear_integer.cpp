#include "ops/cpu/linear_integer.h"

#include <cstdlib>
#include <memory>

#include "ops/cpu/quantised.h"
#include "ops/cpu/quantised_items.h"

namespace bequest {
namespace {

void round_rows(const LinearParams& p, int64_t begin, int64_t end, const IntegerRows& to) {
  BEQUEST_DISPATCH_DOT(round_rows(p, begin, end, to));
}
QuantisedCut integer_cut(const LinearParams& p) { BEQUEST_DISPATCH_DOT(integer_cut(p)); }
void multiply_integer(const LinearParams& p, const IntegerRows& x, const QuantisedItem& item,
                      float* scratch) {
  BEQUEST_DISPATCH_DOT(multiply_integer(p, x, item, scratch));
}

}  // namespace

void linear_integer(const LinearParams& p) {
  check(p.in_features % kGroup == 0, "linear: codes come in groups of 32");
  const int64_t blocks = p.num_tokens * (p.in_features / kGroup);
  const QuantisedCut cut = integer_cut(p);
  const int64_t word_bytes = blocks * kBlockWords * int64_t{sizeof(uint32_t)};
  const int64_t step_bytes = (blocks * 2 * int64_t{sizeof(float)} + 63) / 64 * 64;
  // malloc keeps what the last call freed.
  const std::unique_ptr<char, decltype(&std::free)> memory(
      static_cast<char*>(std::aligned_alloc(
          64, static_cast<size_t>(word_bytes + step_bytes + cut.scratch_bytes * num_threads() + 64))),
      &std::free);
  check(memory != nullptr, "linear: out of memory");
  const IntegerRows x{reinterpret_cast<uint32_t*>(memory.get()),
                      reinterpret_cast<float*>(memory.get() + word_bytes)};
  parallel_for(p.num_tokens, 16, [&](int64_t begin, int64_t end) { round_rows(p, begin, end, x); });
  char* const scratch = memory.get() + word_bytes + step_bytes;
  for_each_quantised_item(p, cut, [&](const QuantisedItem& item, int worker) {
    multiply_integer(p, x, item, reinterpret_cast<float*>(scratch + worker * cut.scratch_bytes));
  });
}

}  // namespace bequest
