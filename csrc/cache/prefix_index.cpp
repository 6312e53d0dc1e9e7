#include "cache/prefix_index.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <random>

#include "core/check.h"

namespace bequest {

namespace {

// Folds the 128-bit product: every bit of the factors reaches every bit of the result.
uint64_t mix(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// Clients choose the tokens; an unknown seed keeps them from choosing long bucket chains.
uint64_t random_seed() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

uint32_t low_bits(int count) {
  check(0 <= count && count <= 32, "hash_bits must be in [0, 32]");
  return static_cast<uint32_t>((uint64_t{1} << count) - 1);
}

}  // namespace

PrefixIndex::PrefixIndex(int32_t num_blocks, int32_t block_size, int hash_bits)
    : block_size_(block_size),
      hash_mask_(low_bits(hash_bits)),
      seed_(random_seed()),
      nodes_(num_blocks),
      tokens_(new int32_t[size_t(num_blocks) * block_size]),  // not set: most of it may never be touched
      buckets_(std::bit_ceil(static_cast<uint32_t>(num_blocks)), kNullBlock) {}

uint32_t PrefixIndex::hash(Parent parent, const int32_t* tokens) const {
  constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;
  uint64_t h = seed_ ^ static_cast<uint32_t>(parent);
  int32_t i = 0;
  for (; i + 1 < block_size_; i += 2) {
    uint64_t pair;
    std::memcpy(&pair, tokens + i, sizeof(pair));
    h = mix(h ^ pair, kOdd);
  }
  if (i < block_size_) h = mix(h ^ static_cast<uint32_t>(tokens[i]), kOdd);
  return static_cast<uint32_t>(mix(h, kOdd)) & hash_mask_;
}

BlockId& PrefixIndex::first_child(Parent parent) {
  return parent > 0 ? nodes_[parent].first_child : roots_[root_slot(parent)].first_child;
}

BlockId PrefixIndex::first_child(Parent parent) const {
  return parent > 0 ? nodes_[parent].first_child : roots_[root_slot(parent)].first_child;
}

bool PrefixIndex::holds(BlockId block, Parent parent, const int32_t* tokens) const {
  return nodes_[block].parent == parent &&
         std::memcmp(tokens_of(block), tokens, size_t(block_size_) * sizeof(int32_t)) == 0;
}

PrefixIndex::Parent PrefixIndex::find_root(std::string_view salt) const {
  const auto it = roots_by_salt_.find(salt);
  return it == roots_by_salt_.end() ? kNoParent : -(it->second + 1);
}

PrefixIndex::Parent PrefixIndex::make_root(std::string_view salt) {
  if (const Parent root = find_root(salt); root != kNoParent) return root;
  if (free_root_slots_.empty()) {
    free_root_slots_.push_back(static_cast<int32_t>(roots_.size()));
    roots_.emplace_back();
  }
  const int32_t slot = free_root_slots_.back();
  roots_[slot].salt = salt;
  roots_by_salt_.emplace(salt, slot);
  free_root_slots_.pop_back();
  return -(slot + 1);
}

BlockId PrefixIndex::find(Parent parent, const int32_t* tokens) const {
  for (BlockId b = bucket(hash(parent, tokens)); b != kNullBlock; b = nodes_[b].next_in_bucket) {
    if (holds(b, parent, tokens)) return b;
  }
  return kNullBlock;
}

void PrefixIndex::insert(Parent parent, const int32_t* tokens, BlockId block) {
  check(!contains(block), "a block enters the prefix index once");
  std::copy_n(tokens, block_size_, tokens_.get() + size_t(block) * block_size_);
  Node& node = nodes_[block];
  node.parent = parent;
  node.hash = hash(parent, tokens);

  BlockId& head = bucket(node.hash);
  node.next_in_bucket = head;
  if (head != kNullBlock) nodes_[head].prev_in_bucket = block;
  head = block;

  BlockId& eldest = first_child(parent);
  node.next_sibling = eldest;
  if (eldest != kNullBlock) nodes_[eldest].prev_sibling = block;
  eldest = block;
  ++size_;
}

// A root that loses its last child vanishes, so that salts do not pile up.
void PrefixIndex::unlink_from_parent(BlockId block) {
  const Node& node = nodes_[block];
  if (node.next_sibling != kNullBlock) nodes_[node.next_sibling].prev_sibling = node.prev_sibling;
  if (node.prev_sibling != kNullBlock) {
    nodes_[node.prev_sibling].next_sibling = node.next_sibling;
    return;
  }
  BlockId& head = first_child(node.parent);
  head = node.next_sibling;
  if (head == kNullBlock && node.parent < 0) {
    const int32_t slot = root_slot(node.parent);
    roots_by_salt_.erase(roots_[slot].salt);
    roots_[slot].salt.clear();
    free_root_slots_.push_back(slot);
  }
}

void PrefixIndex::drop_leaf(BlockId block) {
  unlink_from_parent(block);
  Node& node = nodes_[block];
  if (node.next_in_bucket != kNullBlock) nodes_[node.next_in_bucket].prev_in_bucket = node.prev_in_bucket;
  BlockId& before =
      node.prev_in_bucket == kNullBlock ? bucket(node.hash) : nodes_[node.prev_in_bucket].next_in_bucket;
  before = node.next_in_bucket;
  node = Node{.stamp = node.stamp + 1};
  --size_;
}

// Descends to a leaf, drops it, goes on from its parent: no recursion, a chain may be long.
void PrefixIndex::erase(BlockId block) {
  check(contains(block), "the block is not in the prefix index");
  BlockId at = block;
  while (true) {
    if (nodes_[at].first_child != kNullBlock) {
      at = nodes_[at].first_child;
      continue;
    }
    const Parent parent = nodes_[at].parent;
    drop_leaf(at);
    if (at == block) return;
    at = parent;
  }
}

void PrefixIndex::clear() {
  while (!roots_by_salt_.empty()) erase(roots_[roots_by_salt_.begin()->second].first_child);
}

std::pair<BlockId, int32_t> PrefixIndex::best_child(Parent parent, const int32_t* tokens,
                                                    int32_t num_tokens) const {
  std::pair<BlockId, int32_t> best{kNullBlock, 0};
  const int32_t longest = std::min(num_tokens, block_size_);
  int scanned = 0;
  for (BlockId b = first_child(parent); b != kNullBlock && scanned < kScanLimit; b = nodes_[b].next_sibling) {
    const int32_t* mine = tokens_of(b);
    const auto common = static_cast<int32_t>(std::mismatch(tokens, tokens + longest, mine).first - tokens);
    if (common > best.second) best = {b, common};
    ++scanned;
  }
  return best;
}

int64_t PrefixIndex::count_children(Parent parent) const {
  int64_t count = 0;
  BlockId before = kNullBlock;
  for (BlockId b = first_child(parent); b != kNullBlock; before = b, b = nodes_[b].next_sibling) {
    check(nodes_[b].parent == parent, "prefix index: a child names another parent");
    check(nodes_[b].prev_sibling == before, "prefix index: sibling links disagree");
    check(++count <= size_, "prefix index: siblings form a cycle");
  }
  return count;
}

void PrefixIndex::verify_node(BlockId block) const {
  const Node& node = nodes_[block];
  if (node.parent > 0) {
    check(contains(node.parent), "prefix index: the parent of an indexed block is not indexed");
  } else {
    const int32_t slot = root_slot(node.parent);
    check(slot < static_cast<int32_t>(roots_.size()), "prefix index: a node names a root that never was");
    check(find_root(roots_[slot].salt) == node.parent, "prefix index: a node names a root that is gone");
  }
  check(node.hash == hash(node.parent, tokens_of(block)), "prefix index: a stored hash is stale");
  check(find(node.parent, tokens_of(block)) == block,
        "prefix index: a node cannot be found, or is there twice");
}

void PrefixIndex::verify() const {
  int64_t indexed = 0, children = 0;
  for (BlockId b = 0; b < static_cast<BlockId>(nodes_.size()); ++b) {
    if (!contains(b)) {
      check(nodes_[b].first_child == kNullBlock, "prefix index: a block outside has children");
      continue;
    }
    verify_node(b);
    ++indexed;
    children += count_children(b);
  }
  for (const auto& [salt, slot] : roots_by_salt_) {
    check(roots_[slot].salt == salt, "prefix index: a root has another salt");
    check(roots_[slot].first_child != kNullBlock, "prefix index: a root has no children");
    children += count_children(-(slot + 1));
  }
  check(!contains(kNullBlock), "prefix index: the null block is indexed");
  check(indexed == size_, "prefix index: the count of nodes is wrong");
  check(children == indexed, "prefix index: a node is missing from its parent's children");
}

}  // namespace bequest
