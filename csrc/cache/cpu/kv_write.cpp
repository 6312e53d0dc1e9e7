#include "cache/cpu/kv_write.h"

#include <algorithm>
#include <string>

#include "core/check.h"
#include "core/isa.h"
#include "core/threads.h"

namespace bequest {

BEQUEST_DECLARE_PER_ISA(void write_kv_tokens(const KvWriteParams& p, int64_t begin, int64_t end))

namespace {

void write_kv_tokens(const KvWriteParams& p, int64_t begin, int64_t end) {
  BEQUEST_DISPATCH_ISA(write_kv_tokens(p, begin, end));
}

}  // namespace

void check_kv_places(const int64_t* slots, int64_t count, const KvLayout& layout, int64_t layer) {
  check(layer >= 0 && layer < layout.num_layers, "write_kv: layer out of range");
  for (int64_t t = 0; t < count; ++t) {
    if (slots[t] < -1 || slots[t] >= layout.num_slots()) [[unlikely]] {
      fail("write_kv: slot " + std::to_string(slots[t]) + " of token " + std::to_string(t) +
           " is outside the cache of " + std::to_string(layout.num_slots()) + " slots");
    }
  }
}

void write_kv(const KvWriteParams& p) {
  check_kv_places(p.slots, p.num_tokens, p.layout, p.layer);
  // About 64 KiB per chunk: less is not worth waking a thread for.
  const int64_t floats_per_token = 2 * p.layout.num_kv_heads * p.layout.head_dim;
  const int64_t grain = std::max<int64_t>(1, 16384 / floats_per_token);
  parallel_for(p.num_tokens, grain, [&](int64_t begin, int64_t end) { write_kv_tokens(p, begin, end); });
}

}  // namespace bequest
