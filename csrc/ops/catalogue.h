// A set of items, each a sequence of tokens, as a prefix tree: what may follow the tokens chosen so far.
//
// It is an op, not a part of the cache: it knows tokens and logits, never blocks. Nodes are numbered breadth
// first and siblings stand together in ascending order of their tokens, so that a node is one integer, its
// children are one span, and two arrays of integers are the whole tree. The last level, which holds most
// nodes, has tokens alone: ten million items of three tokens take no more than the array they came from.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace bequest {

// The tree's arrays in host or device memory. Immutable, valid as long as the arrays are.
struct CatalogueView {
  const int32_t* tokens = nullptr;  // [num_nodes] the token that leads to the node; the root's is -1
  const int32_t* first_child =
      nullptr;  // [num_inner + 1]; children of n: [first_child[n], first_child[n + 1])
  const uint32_t* terminal =
      nullptr;  // bits [num_inner]: an item ends at a node that has children; may be null
  int32_t num_nodes = 0;
  int32_t num_inner = 0;  // nodes from here on have no children

  constexpr int32_t begin(int32_t node) const { return node < num_inner ? first_child[node] : 0; }
  constexpr int32_t end(int32_t node) const { return node < num_inner ? first_child[node + 1] : 0; }
  constexpr bool contains(int32_t node) const { return node >= 0 && node < num_nodes; }

  // Whether the tokens that lead here are an item.
  constexpr bool is_terminal(int32_t node) const {
    if (begin(node) == end(node)) return true;
    return terminal != nullptr && (terminal[node / 32] >> (node % 32) & 1) != 0;
  }

  // -1: there is none.
  constexpr int32_t child(int32_t node, int32_t token) const {
    int32_t low = begin(node);
    const int32_t last = end(node);
    for (int32_t high = last; low < high;) {
      const int32_t middle = low + (high - low) / 2;
      if (tokens[middle] < token)
        low = middle + 1;
      else
        high = middle;
    }
    return low < last && tokens[low] == token ? low : -1;
  }
};

// What may follow a node: its children and, where an item is complete, the end tokens. A plain record that
// both backends read, from host or device memory.
struct CatalogueRule {
  CatalogueView tree;                   // tokens null: anything may follow
  const int32_t* end_tokens = nullptr;  // [num_ends], distinct
  int32_t num_ends = 0;
  int32_t reserved = 0;

  constexpr bool restricts() const { return tree.tokens != nullptr; }
};
static_assert(sizeof(CatalogueRule) == 48);

// Where items come from: rows of an array padded with -1, or a list of tokens cut by offsets.
struct CatalogueItems {
  const int32_t* tokens;   // [num_items, width], or [offsets[num_items]]
  const int64_t* offsets;  // [num_items + 1], or null
  int64_t num_items;
  int64_t width;  // without offsets

  // -1 behind the item's end.
  int32_t token(int64_t item, int64_t level) const {
    if (offsets == nullptr) return level < width ? tokens[item * width + level] : -1;
    const int64_t at = offsets[item] + level;
    return at < offsets[item + 1] ? tokens[at] : -1;
  }
};

class Catalogue {
 public:
  // Sorts and deduplicates. Takes 8 bytes per item beside the result, and threads of its own: a catalogue is
  // loaded while the kernels' threads serve requests. Throws on an empty item or set, on tokens outside
  // [0, vocab_size) and on tokens behind padding, naming the first such item.
  Catalogue(const CatalogueItems& items, int32_t vocab_size, int num_threads);

  static constexpr int32_t kRoot = 0;

  CatalogueView view() const;
  int32_t child(int32_t node, int32_t token) const;  // -1: there is none
  std::span<const int32_t> children(int32_t node) const;
  bool is_terminal(int32_t node) const;

  int64_t num_items() const { return num_items_; }  // distinct ones
  int32_t vocab_size() const { return vocab_size_; }
  int64_t num_bytes() const;
  std::span<const int32_t> tokens() const { return tokens_; }
  std::span<const int32_t> first_child() const { return first_child_; }
  std::span<const uint32_t> terminal() const { return terminal_; }

 private:
  void check_node(int32_t node) const;

  int32_t vocab_size_;
  int64_t num_items_ = 0;
  std::vector<int32_t> tokens_;
  std::vector<int32_t> first_child_;
  std::vector<uint32_t> terminal_;  // empty if no item is the beginning of another
};

}  // namespace bequest
