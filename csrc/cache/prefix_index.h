// Finds cached blocks by what they hold: a forest with one node per indexed block.
//
// A node is the pair (parent, token ids of the block); its parent is the node of the block before, or a root.
// A root stands for a salt, the bytes that divide the cache (tenant, adapter, encoder input, ...). A hash of
// the pair finds candidates, and the stored parent and tokens are compared on every hit, so that equal nodes
// mean equal histories up to the salt: a collision costs time and never serves a wrong block.
//
// Nodes live in arrays indexed by block, so a block has at most one node and nothing is allocated per node.
// Invariants: the parent of a node is in the index; a root has children. Hence a node leaves together with
// everything below it. Every operation is O(1) per node that it touches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace bequest {

using BlockId = int32_t;
inline constexpr BlockId kNullBlock = 0;

class PrefixIndex {
 public:
  // What a node hangs below: block b as b, root r as -(r + 1), nothing as 0 (block 0 is never indexed).
  using Parent = int32_t;
  static constexpr Parent kNoParent = 0;

  // A node at one moment. It ends when the node leaves the index, and stays ended if the block enters again.
  struct NodeRef {
    BlockId block;
    uint64_t stamp;
  };

  // `hash_bits` below 32 makes collisions likely, for tests.
  PrefixIndex(int32_t num_blocks, int32_t block_size, int hash_bits);

  bool contains(BlockId block) const { return nodes_[block].parent != kNoParent; }
  bool alive(NodeRef ref) const { return contains(ref.block) && nodes_[ref.block].stamp == ref.stamp; }
  NodeRef ref(BlockId block) const { return {block, nodes_[block].stamp}; }
  int32_t size() const { return size_; }
  int32_t num_roots() const { return static_cast<int32_t>(roots_by_salt_.size()); }

  // The root of `salt`, or kNoParent if nothing is indexed below it.
  Parent find_root(std::string_view salt) const;
  // The same, made if it is missing. REQUIRES: an insert below it follows at once.
  Parent make_root(std::string_view salt);

  // The child of `parent` that holds exactly tokens[0, block_size), or kNullBlock.
  BlockId find(Parent parent, const int32_t* tokens) const;
  // Enters `block`. REQUIRES: !contains(block), find(parent, tokens) == kNullBlock
  void insert(Parent parent, const int32_t* tokens, BlockId block);
  // Takes the node of `block` and all nodes below it out. REQUIRES: contains(block)
  void erase(BlockId block);
  void clear();

  // The child of `parent` with the longest common prefix with tokens[0, num_tokens), and its length (0:
  // none). Looks at the youngest kScanLimit children only.
  std::pair<BlockId, int32_t> best_child(Parent parent, const int32_t* tokens, int32_t num_tokens) const;
  static constexpr int kScanLimit = 64;

  // Throws Error, naming the first invariant that does not hold.
  void verify() const;

 private:
  struct Node {
    Parent parent = kNoParent;
    BlockId first_child = kNullBlock;
    BlockId next_sibling = kNullBlock;
    BlockId prev_sibling = kNullBlock;
    BlockId next_in_bucket = kNullBlock;
    BlockId prev_in_bucket = kNullBlock;
    uint32_t hash = 0;
    uint64_t stamp = 0;
  };

  struct Root {
    std::string salt;
    BlockId first_child = kNullBlock;
  };

  struct SaltHash : std::hash<std::string_view> {
    using is_transparent = void;
  };

  static int32_t root_slot(Parent parent) { return -(parent + 1); }
  uint32_t hash(Parent parent, const int32_t* tokens) const;
  BlockId& bucket(uint32_t hash) { return buckets_[hash & (buckets_.size() - 1)]; }
  BlockId bucket(uint32_t hash) const { return buckets_[hash & (buckets_.size() - 1)]; }
  BlockId& first_child(Parent parent);
  BlockId first_child(Parent parent) const;
  const int32_t* tokens_of(BlockId block) const { return tokens_.get() + size_t(block) * block_size_; }
  bool holds(BlockId block, Parent parent, const int32_t* tokens) const;
  void unlink_from_parent(BlockId block);
  void drop_leaf(BlockId block);
  void verify_node(BlockId block) const;
  int64_t count_children(Parent parent) const;

  const int32_t block_size_;
  const uint32_t hash_mask_;
  const uint64_t seed_;
  int32_t size_ = 0;
  std::vector<Node> nodes_;            // [NB]
  std::unique_ptr<int32_t[]> tokens_;  // [NB, BS], a row is set while its block is indexed
  std::vector<BlockId> buckets_;       // heads of the chains of equal hash; a power of two of them
  std::vector<Root> roots_;
  std::vector<int32_t> free_root_slots_;
  std::unordered_map<std::string, int32_t, SaltHash, std::equal_to<>> roots_by_salt_;
};

}  // namespace bequest
