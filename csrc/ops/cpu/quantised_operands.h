// The codes of a panel as operands of integer dot products, for *.dot.cpp files.
//
// A word of codes becomes vectors of pairs (16 bits each) by shifts and masks: of n codes the pair number p
// is those of k = p and k = p + n / 2. Where bytes are multiplied it becomes quads: those of k = p, p + n /
// 4, …
#pragma once

#include "core/dot_products.h"
#include "ops/cpu/linear_tiles.h"
#include "ops/cpu/quantised.h"

namespace bequest::BEQUEST_ISA {
namespace {

// Q4_1, Q4_0: codes 0 … 15 with a scale and an offset.
struct Codes4 {
  using Block = QuantisedGroup<4>;
  static constexpr int kBlockGroups = 1;  // of 32 values of k
  static constexpr int kScales = 1;       // of a group
  static constexpr int kWordOperands = kQuads ? 2 : 4;
  static constexpr int kWordCodes = 8;
  static constexpr bool kHasOffset = true;

  static VecU operand(const Block& block, int, int o, int v) {
    const VecU word = load_words(block.words[o / kWordOperands] + v * kLanes);
    return (word >> (4 * (o % kWordOperands))) & (kQuads ? 0x0f0f0f0fu : 0x000f000fu);
  }
  static VecF scale(const Block& block, int, int, int v) { return load_half(block.scales + v * kLanes); }
  static VecF offset(const Block& block, int, int v) { return load_half(block.offsets + v * kLanes); }
};

// Q8_0: codes -128 … 127 with a scale.
struct Codes8 {
  using Block = QuantisedGroup<8>;
  static constexpr int kBlockGroups = 1;
  static constexpr int kScales = 1;
  static constexpr int kWordOperands = kQuads ? 1 : 2;
  static constexpr int kWordCodes = 4;
  static constexpr bool kHasOffset = false;

  static VecU operand(const Block& block, int, int o, int v) {
    const VecU word = load_words(block.words[o / kWordOperands] + v * kLanes);
    if constexpr (kQuads) return word;
    return (VecU)((o % 2 == 0 ? (VecS)word << 8 : (VecS)word) >> 8);
  }
  static VecF scale(const Block& block, int, int, int v) { return load_half(block.scales + v * kLanes); }
  static VecF offset(const Block&, int, int) { return VecF{}; }
};

// f<Codes>() for the codes of a format.
template <class F>
void with_codes(WeightFormat format, F f) {
  switch (exact_of(format)) {
    case WeightFormat::kQ4:
      return f.template operator()<Codes4>();
    case WeightFormat::kQ8:
      return f.template operator()<Codes8>();
    default:
      fail("linear: no codes");
  }
}

// A group of a panel made operands.
template <class Codes>
struct OperandGroup {
  static constexpr int kOperands = kQuads ? 8 : 16;
  uint32_t words[kOperands][kPanelWidth];
  float scales[Codes::kScales][kPanelWidth];
  float offsets[Codes::kHasOffset ? kPanelWidth : 0];
};

// P panels of groups that were made operands.
template <class Codes>
struct OperandPanels {
  static constexpr int kScales = Codes::kScales, kOperands = OperandGroup<Codes>::kOperands;
  static constexpr bool kHasOffset = Codes::kHasOffset;
  const OperandGroup<Codes>* first;
  int64_t depth;  // groups of a panel
  const OperandGroup<Codes>* at = nullptr;

  void open(int64_t g) { at = first + g; }
  VecU operand(int j, int o, int v) const { return load_words(at[j * depth].words[o] + v * kLanes); }
  VecF scale(int j, int part, int v) const { return load(at[j * depth].scales[part] + v * kLanes); }
  VecF offset(int j, int v) const { return load(at[j * depth].offsets + v * kLanes); }
};

// The codes of a weight.
template <class Codes>
class CodePanels {
  using Block = typename Codes::Block;

 public:
  explicit CodePanels(const LinearParams& p)
      : blocks_(static_cast<const Block*>(p.weight)),
        depth_(p.in_features / (kGroup * Codes::kBlockGroups)) {}

  // P panels, of which a group is made operands as it is multiplied; meanwhile those after them are asked
  // for.
  template <int P>
  struct View {
    static constexpr int kScales = Codes::kScales, kOperands = OperandGroup<Codes>::kOperands;
    static constexpr bool kHasOffset = Codes::kHasOffset;
    const Block* first;
    int64_t depth;  // blocks of a panel
    const Block* at = nullptr;
    int sub = 0;  // which group of a block

    void open(int64_t g) {
      at = first + g / Codes::kBlockGroups;
      sub = static_cast<int>(g % Codes::kBlockGroups);
      constexpr size_t kShare = sizeof(Block) / Codes::kBlockGroups;
#pragma GCC unroll 8
      for (int j = 0; j < P; ++j)
        for (size_t line = 0; line < kShare; line += 64)
          __builtin_prefetch(reinterpret_cast<const char*>(at + (P + j) * depth) + sub * kShare + line, 0, 2);
    }
    VecU operand(int j, int o, int v) const { return Codes::operand(at[j * depth], sub, o, v); }
    VecF scale(int j, int part, int v) const { return Codes::scale(at[j * depth], sub, part, v); }
    VecF offset(int j, int v) const { return Codes::offset(at[j * depth], sub, v); }
  };

  template <int P>
  View<P> from(int64_t panel) const {
    return {blocks_ + panel * depth_, depth_};
  }

  // to [groups] = those of a panel
  void expand(int64_t panel, Span groups, OperandGroup<Codes>* to) const {
    for (int64_t g = groups.begin; g < groups.end; ++g, ++to) {
      const Block& block = blocks_[panel * depth_ + g / Codes::kBlockGroups];
      const int sub = static_cast<int>(g % Codes::kBlockGroups);
      for (int v = 0; v < kVecs; ++v) {
#pragma GCC unroll 16
        for (int o = 0; o < OperandGroup<Codes>::kOperands; ++o) {
          const VecU operand = Codes::operand(block, sub, o, v);
          std::memcpy(to->words[o] + v * kLanes, &operand, sizeof(operand));
        }
        for (int part = 0; part < Codes::kScales; ++part)
          store(to->scales[part] + v * kLanes, Codes::scale(block, sub, part, v));
        if constexpr (Codes::kHasOffset) store(to->offsets + v * kLanes, Codes::offset(block, sub, v));
      }
    }
  }

 private:
  const Block* blocks_;  // [panels, blocks of a row]
  int64_t depth_;
};

}  // namespace
}  // namespace bequest::BEQUEST_ISA
