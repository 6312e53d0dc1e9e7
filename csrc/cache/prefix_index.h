// Finds cached blocks by what they hold: a forest whose nodes are stretches of `block_size` tokens.
//
// A node is the pair (parent, token ids); its parent is the node of the tokens before, or a root. A root
// stands for a salt, the bytes that divide the cache (tenant, adapter, encoder input, ...). A hash of the
// pair finds candidates, and the stored parent and tokens are compared on every hit, so that equal nodes mean
// equal histories up to the salt: a collision costs time and never serves a wrong block.
//
// A node knows one block for each strip of the cache (strips.h), or none where that block is gone. Where a
// strip that keeps all tokens loses a block, nobody can be served from there on: the node leaves with
// everything below it. A window's block may go alone. A node without blocks and without children leaves.
//
// Nodes live in arrays, so that nothing is allocated per node. Invariants: the parent of a node is in the
// index; a root has children; a block has at most one node. Every operation is O(1) per node that it touches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cache/strips.h"

namespace bequest {

using BlockId = int32_t;
inline constexpr BlockId kNullBlock = 0;
using NodeId = int32_t;
inline constexpr NodeId kNoNode = 0;

class PrefixIndex {
 public:
  // What a node hangs below: node n as n, root r as -(r + 1), nothing as 0.
  using Parent = int32_t;
  static constexpr Parent kNoParent = 0;

  // A node at one moment. It ends when the node leaves the index, and stays ended if its number is used
  // again.
  struct NodeRef {
    NodeId node;
    uint64_t stamp;
  };

  // `hash_bits` below 32 makes collisions likely, for tests.
  PrefixIndex(int32_t num_blocks, int32_t block_size, const Strips& strips, int hash_bits);

  bool contains(BlockId block) const { return node_of_[block] != kNoNode; }
  bool alive(NodeRef ref) const { return is_used(ref.node) && nodes_[ref.node].stamp == ref.stamp; }
  NodeRef ref(NodeId node) const { return {node, nodes_[node].stamp}; }
  int32_t size() const { return size_; }
  // Whether no further node can be inserted.
  bool is_full() const { return free_nodes_.empty() && num_made_ == static_cast<NodeId>(nodes_.size()); }
  // The block of a node's tokens in a strip, or kNullBlock.
  BlockId block(NodeId node, int32_t strip) const { return blocks_[size_t(node) * strips_.count() + strip]; }
  // REQUIRES: contains(block)
  int32_t strip_of(BlockId of) const {
    int32_t strip = 0;
    while (block(node_of_[of], strip) != of) ++strip;
    return strip;
  }
  int32_t num_roots() const { return static_cast<int32_t>(roots_by_salt_.size()); }

  // The root of `salt`, or kNoParent if nothing is indexed below it.
  Parent find_root(std::string_view salt) const;
  // The same, made if it is missing. REQUIRES: an insert below it follows at once.
  Parent make_root(std::string_view salt);

  // The child of `parent` that stands for exactly tokens[0, block_size), or kNoNode.
  NodeId find(Parent parent, const int32_t* tokens) const;
  // Enters a node without blocks. REQUIRES: !is_full(), find(parent, tokens) == kNoNode
  NodeId insert(Parent parent, const int32_t* tokens);
  // The node's tokens are in `block`, too. REQUIRES: !contains(block); the node has none for the strip
  void put(NodeId node, int32_t strip, BlockId block);
  // The block holds something else from now on. REQUIRES: contains(block)
  void drop_block(BlockId block);
  // Takes a node and all nodes below it out.
  void erase(NodeId node);
  // Takes a node out if nothing can be served from it, and then likewise those above it.
  void prune(NodeId node);
  void clear();

  // The child of `parent` with the longest common prefix with tokens[0, num_tokens), among those that serve
  // inside, and its length (0: none). Looks at the youngest kScanLimit children.
  std::pair<NodeId, int32_t> best_child(Parent parent, const int32_t* tokens, int32_t num_tokens) const;
  // Whether the tokens of a node can be read by whoever goes on inside it.
  bool serves_inside(NodeId node) const;
  static constexpr int kScanLimit = 64;

  // Throws Error, naming the first invariant that does not hold.
  void verify() const;

 private:
  struct Node {
    Parent parent = kNoParent;
    NodeId first_child = kNoNode;
    NodeId next_sibling = kNoNode;
    NodeId prev_sibling = kNoNode;
    NodeId next_in_bucket = kNoNode;
    NodeId prev_in_bucket = kNoNode;
    uint32_t hash = 0;
    uint64_t stamp = 0;
  };

  struct Root {
    std::string salt;
    NodeId first_child = kNoNode;
  };

  struct SaltHash : std::hash<std::string_view> {
    using is_transparent = void;
  };

  static int32_t root_slot(Parent parent) { return -(parent + 1); }
  bool is_used(NodeId node) const { return nodes_[node].parent != kNoParent; }
  bool has_blocks(NodeId node) const;
  uint32_t hash(Parent parent, const int32_t* tokens) const;
  NodeId& bucket(uint32_t hash) { return buckets_[hash & (buckets_.size() - 1)]; }
  NodeId bucket(uint32_t hash) const { return buckets_[hash & (buckets_.size() - 1)]; }
  NodeId& first_child(Parent parent);
  NodeId first_child(Parent parent) const;
  const int32_t* tokens_of(NodeId node) const { return tokens_.get() + size_t(node) * block_size_; }
  bool holds(NodeId node, Parent parent, const int32_t* tokens) const;
  NodeId take_number();
  void unlink_from_parent(NodeId node);
  void drop_leaf(NodeId node);
  void verify_node(NodeId node) const;
  int64_t count_children(Parent parent) const;

  const int32_t block_size_;
  const Strips& strips_;
  const uint32_t hash_mask_;
  const uint64_t seed_;
  int32_t size_ = 0;
  NodeId num_made_ = 1;                // numbers below it were used; 0 is no node
  std::vector<NodeId> free_nodes_;     // of those, the ones that are not now
  std::vector<Node> nodes_;            // [N]
  std::vector<BlockId> blocks_;        // [N, strips]
  std::vector<NodeId> node_of_;        // [NB]
  std::unique_ptr<int32_t[]> tokens_;  // [N, BS], a row is set while its node is used
  std::vector<NodeId> buckets_;        // heads of the chains of equal hash; a power of two of them
  std::vector<Root> roots_;
  std::vector<int32_t> free_root_slots_;
  std::unordered_map<std::string, int32_t, SaltHash, std::equal_to<>> roots_by_salt_;
};

}  // namespace bequest
