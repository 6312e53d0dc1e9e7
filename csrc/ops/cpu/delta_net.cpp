#include "ops/cpu/delta_net.h"

#include <memory>
#include <string>

#include "core/isa.h"
#include "ops/cpu/delta_net_passes.h"

namespace bequest {

BEQUEST_DECLARE_PER_ISA(void delta_net(const DeltaNetParams& p, const DeltaNetScratch& scratch))

namespace {

void check_slots(const int32_t* slots, int64_t count, int64_t num_slots) {
  for (int64_t i = 0; i < count; ++i) {
    if (slots[i] < -1 || slots[i] >= num_slots) [[unlikely]]
      fail("delta_net: slot " + std::to_string(slots[i]) + " is outside the table of " +
           std::to_string(num_slots));
  }
}

void run(const DeltaNetParams& p, const DeltaNetScratch& scratch) {
  BEQUEST_DISPATCH_ISA(delta_net(p, scratch));
}

}  // namespace

void delta_net(const DeltaNetParams& p) {
  const DeltaNetSizes& n = p.sizes;
  check(n.key_heads > 0 && n.value_heads % n.key_heads == 0, "delta_net: value heads must share keys evenly");
  check(n.key_dim > 0 && n.value_dim > 0 && n.conv_width > 0, "delta_net: sizes must be positive");
  check_slots(p.starts, p.num_sequences, p.num_slots);
  check_slots(p.slots, p.num_tokens, p.num_slots);
  if (p.num_tokens == 0) return;
  const int64_t convolved = p.num_tokens * n.conv_channels();
  const int64_t gates = p.num_tokens * 2 * n.value_heads;
  const auto memory = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(convolved + gates));
  run(p, {memory.get(), memory.get() + convolved});
}

}  // namespace bequest
