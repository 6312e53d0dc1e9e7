// The codes of a panel as operands of integer dot products, for *.dot.cpp files.
//
// A word of codes becomes vectors of pairs (16 bits each) by shifts and masks: of n codes the pair number p
// is those of k = p and k = p + n / 2. Where bytes are multiplied it becomes quads: those of k = p, p + n /
// 4, …
#pragma once

#include "core/dot_products.h"
#include "ops/cpu/quantised_codes.h"

namespace bequest::BEQUEST_ISA {
namespace {

inline constexpr int kGroupOperands = kQuads ? 8 : 16;

inline VecU shifted_left(VecU v, int by) { return by >= 0 ? v << by : v >> -by; }

// Bits 4 and above of an operand, from those of the codes number `first`, which is its own lowest, and so on.
template <class Codes>
VecU high_bits(const typename Codes::Block& block, int group, int first, int v) {
  constexpr uint32_t kMask = (1u << Codes::kHighBits) - 1;
  const HighPlace place = high_place(Codes::kHighBits, first);
  const VecU word = load_words(Codes::high(block, group, place.word) + v * kLanes);
  const VecU pairs = shifted_left(word, 4 - place.shift) & (kMask << 4 | kMask << 20);
  if constexpr (!kQuads) return pairs;
  // Those of the odd bytes are two codes further on.
  const int next = high_place(Codes::kHighBits, first + 2).shift;
  return pairs | (shifted_left(word, 12 - next) & (kMask << 12 | kMask << 28));
}

// Operand number o of a group.
template <class Codes>
VecU operand(const typename Codes::Block& block, int group, int o, int v) {
  constexpr int kEach = kGroupOperands / Codes::kWords;  // operands of a word
  const VecU word = load_words(Codes::words(block, group, o / kEach) + v * kLanes);
  if constexpr (Codes::kBits == 8) {
    if constexpr (kQuads) return word;
    return (VecU)((o % 2 == 0 ? (VecS)word << 8 : (VecS)word) >> 8);
  } else {
    // The upper half of each byte by one shift, where bytes are multiplied.
    VecU codes = kQuads && o % kEach == 1
                     ? (VecU)((VecO)word >> 4)
                     : (word >> (4 * (o % kEach))) & (kQuads ? 0x0f0f0f0fu : 0x000f000fu);
    if constexpr (Codes::kHighBits > 0) codes |= high_bits<Codes>(block, group, o / kEach * 8 + o % kEach, v);
    if constexpr (Codes::kLeast == 0) return codes;
    if constexpr (kQuads) return (VecU)((VecB)codes + static_cast<int8_t>(Codes::kLeast));
    return (VecU)((VecS)codes + static_cast<int16_t>(Codes::kLeast));
  }
}

// A group of a panel made operands.
template <class Codes>
struct OperandGroup {
  uint32_t words[kGroupOperands][kPanelWidth];
  float scales[Codes::kScales][kPanelWidth];
  float offsets[Codes::kHasOffset ? kPanelWidth : 0];
};

// P panels of groups that were made operands.
template <class Codes>
struct OperandPanels {
  static constexpr int kScales = Codes::kScales;
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
    static constexpr int kScales = Codes::kScales;
    static constexpr bool kHasOffset = Codes::kHasOffset;
    const Block* first;
    int64_t depth;  // blocks of a panel
    const Block* at = nullptr;
    int group = 0;  // of the block

    void open(int64_t g) {
      const GroupPlace<Codes> place(g);
      at = first + place.block;
      group = place.group;
#pragma GCC unroll 8
      for (int j = 0; j < P; ++j) prefetch_group<Codes>(at + (P + j) * depth, group);
    }
    VecU operand(int j, int o, int v) const {
      return BEQUEST_ISA::operand<Codes>(at[j * depth], group, o, v);
    }
    VecF scale(int j, int part, int v) const { return Codes::scale(at[j * depth], group, part, v); }
    VecF offset(int j, int v) const { return Codes::offset(at[j * depth], group, v); }
  };

  template <int P>
  View<P> from(int64_t panel) const {
    return {blocks_ + panel * depth_, depth_};
  }

  // to [groups] = those of a panel
  void expand(int64_t panel, Span groups, OperandGroup<Codes>* to) const {
    for (int64_t g = groups.begin; g < groups.end; ++g, ++to) {
      const GroupPlace<Codes> place(g);
      const Block& block = blocks_[panel * depth_ + place.block];
      for (int v = 0; v < kVecs; ++v) {
#pragma GCC unroll 16
        for (int o = 0; o < kGroupOperands; ++o) {
          const VecU made = operand<Codes>(block, place.group, o, v);
          std::memcpy(to->words[o] + v * kLanes, &made, sizeof(made));
        }
        for (int part = 0; part < Codes::kScales; ++part)
          store(to->scales[part] + v * kLanes, Codes::scale(block, place.group, part, v));
        if constexpr (Codes::kHasOffset)
          store(to->offsets + v * kLanes, Codes::offset(block, place.group, v));
      }
    }
  }

 private:
  const Block* blocks_;  // [panels, blocks of a row]
  int64_t depth_;
};

}  // namespace
}  // namespace bequest::BEQUEST_ISA
