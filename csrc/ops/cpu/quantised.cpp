#include "ops/cpu/quantised.h"

#include "core/threads.h"

namespace bequest {
namespace {

// A group of a row as the file holds it.
struct Q4_1 {
  static constexpr int kBits = 4;
  uint16_t scale, offset;
  uint8_t codes[16];  // code k in the low half of byte k, code 16 + k in the high one

  uint32_t word(int index) const {
    const int shift = index / 2 * 4;
    uint32_t word = 0;
    for (int i = 0; i < 8; ++i) word |= uint32_t{codes[index % 2 * 8 + i] >> shift & 15u} << 4 * i;
    return word;
  }
};
struct Q8_0 {
  static constexpr int kBits = 8;
  static constexpr uint16_t offset = 0;
  uint16_t scale;
  uint8_t codes[32];

  uint32_t word(int index) const {
    uint32_t word;
    std::memcpy(&word, codes + 4 * index, sizeof(word));
    return word;
  }
};
static_assert(sizeof(Q4_1) == 20 && sizeof(Q8_0) == 34);

template <class Stored>
void pack(const QuantisedPackParams& p) {
  using Group = QuantisedGroup<Stored::kBits>;
  const int64_t groups = p.in_features / kGroup;
  parallel_for(p.num_rows, 64, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const uint8_t* from = p.rows + row * groups * int64_t{sizeof(Stored)};
      const int64_t panel = (p.first_row + row) / kPanelWidth, column = (p.first_row + row) % kPanelWidth;
      Group* to = static_cast<Group*>(p.packed) + panel * groups;
      for (int64_t g = 0; g < groups; ++g, from += sizeof(Stored)) {
        Stored stored;
        std::memcpy(&stored, from, sizeof(stored));
        to[g].scales[column] = stored.scale;
        to[g].offsets[column] = stored.offset;
        for (int i = 0; i < Group::kWords; ++i) to[g].words[i][column] = stored.word(i);
      }
    }
  });
}

}  // namespace

void pack_quantised(const QuantisedPackParams& p) {
  check(p.first_row >= 0 && p.num_rows >= 0, "pack_quantised: negative rows");
  check(p.in_features >= kGroup && p.in_features % kGroup == 0, "pack_quantised: K is no multiple of 32");
  check(p.bits == 4 || p.bits == 8, "pack_quantised: codes have 4 or 8 bits");
  p.bits == 4 ? pack<Q4_1>(p) : pack<Q8_0>(p);
}

}  // namespace bequest
