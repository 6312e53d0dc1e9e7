#include "cache/prefix_index.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <random>
#include <utility>

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

// With a strip that keeps all tokens every node has a block there. Without one, tokens that slid out stay as
// nodes while something below them can be served: a few times as many as there are blocks is plenty.
size_t most_nodes(int32_t num_blocks, const Strips& strips) {
  return size_t(num_blocks) * (strips.keeps_some_whole() ? 1 : 4);
}

}  // namespace

PrefixIndex::PrefixIndex(int32_t num_blocks, int32_t block_size, const Strips& strips, int hash_bits)
    : block_size_(block_size),
      strips_(strips),
      hash_mask_(low_bits(hash_bits)),
      seed_(random_seed()),
      nodes_(most_nodes(num_blocks, strips)),
      blocks_(nodes_.size() * strips.count(), kNullBlock),
      node_of_(num_blocks, kNoNode),
      tokens_(new int32_t[nodes_.size() * block_size]),  // not set: most of it may never be touched
      buckets_(std::bit_ceil(nodes_.size()), kNoNode) {}

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

NodeId& PrefixIndex::first_child(Parent parent) {
  return parent > 0 ? nodes_[parent].first_child : roots_[root_slot(parent)].first_child;
}

NodeId PrefixIndex::first_child(Parent parent) const {
  return parent > 0 ? nodes_[parent].first_child : roots_[root_slot(parent)].first_child;
}

bool PrefixIndex::holds(NodeId node, Parent parent, const int32_t* tokens) const {
  return nodes_[node].parent == parent &&
         std::memcmp(tokens_of(node), tokens, size_t(block_size_) * sizeof(int32_t)) == 0;
}

bool PrefixIndex::has_blocks(NodeId node) const {
  const BlockId* blocks = blocks_.data() + size_t(node) * strips_.count();
  return std::any_of(blocks, blocks + strips_.count(), [](BlockId block) { return block != kNullBlock; });
}

bool PrefixIndex::serves_inside(NodeId node) const {
  for (int32_t s = 0; s < strips_.count(); ++s) {
    if (block(node, s) == kNullBlock && !strips_.sees_itself_alone(s)) return false;
  }
  return true;
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

NodeId PrefixIndex::find(Parent parent, const int32_t* tokens) const {
  for (NodeId n = bucket(hash(parent, tokens)); n != kNoNode; n = nodes_[n].next_in_bucket) {
    if (holds(n, parent, tokens)) return n;
  }
  return kNoNode;
}

NodeId PrefixIndex::take_number() {
  check(!is_full(), "the prefix index is full");
  if (free_nodes_.empty()) return num_made_++;
  const NodeId node = free_nodes_.back();
  free_nodes_.pop_back();
  return node;
}

NodeId PrefixIndex::insert(Parent parent, const int32_t* tokens) {
  const NodeId number = take_number();
  std::copy_n(tokens, block_size_, tokens_.get() + size_t(number) * block_size_);
  Node& node = nodes_[number];
  node.parent = parent;
  node.hash = hash(parent, tokens);

  NodeId& head = bucket(node.hash);
  node.next_in_bucket = head;
  if (head != kNoNode) nodes_[head].prev_in_bucket = number;
  head = number;

  NodeId& eldest = first_child(parent);
  node.next_sibling = eldest;
  if (eldest != kNoNode) nodes_[eldest].prev_sibling = number;
  eldest = number;
  ++size_;
  return number;
}

void PrefixIndex::put(NodeId node, int32_t strip, BlockId block) {
  check(!contains(block), "a block enters the prefix index once");
  BlockId& place = blocks_[size_t(node) * strips_.count() + strip];
  check(place == kNullBlock, "a node has one block for each strip");
  place = block;
  node_of_[block] = node;
}

void PrefixIndex::drop_block(BlockId block) {
  check(contains(block), "the block is not in the prefix index");
  const NodeId node = node_of_[block];
  BlockId* blocks = blocks_.data() + size_t(node) * strips_.count();
  const auto strip = static_cast<int32_t>(std::find(blocks, blocks + strips_.count(), block) - blocks);
  if (strips_.is_whole(strip)) return erase(node);
  blocks[strip] = kNullBlock;
  node_of_[block] = kNoNode;
  prune(node);
}

// A root that loses its last child vanishes, so that salts do not pile up.
void PrefixIndex::unlink_from_parent(NodeId number) {
  const Node& node = nodes_[number];
  if (node.next_sibling != kNoNode) nodes_[node.next_sibling].prev_sibling = node.prev_sibling;
  if (node.prev_sibling != kNoNode) {
    nodes_[node.prev_sibling].next_sibling = node.next_sibling;
    return;
  }
  NodeId& head = first_child(node.parent);
  head = node.next_sibling;
  if (head == kNoNode && node.parent < 0) {
    const int32_t slot = root_slot(node.parent);
    roots_by_salt_.erase(roots_[slot].salt);
    roots_[slot].salt.clear();
    free_root_slots_.push_back(slot);
  }
}

void PrefixIndex::drop_leaf(NodeId number) {
  unlink_from_parent(number);
  Node& node = nodes_[number];
  if (node.next_in_bucket != kNoNode) nodes_[node.next_in_bucket].prev_in_bucket = node.prev_in_bucket;
  NodeId& before =
      node.prev_in_bucket == kNoNode ? bucket(node.hash) : nodes_[node.prev_in_bucket].next_in_bucket;
  before = node.next_in_bucket;
  node = Node{.stamp = node.stamp + 1};
  BlockId* blocks = blocks_.data() + size_t(number) * strips_.count();
  for (int32_t s = 0; s < strips_.count(); ++s) node_of_[std::exchange(blocks[s], kNullBlock)] = kNoNode;
  free_nodes_.push_back(number);
  --size_;
}

// Descends to a leaf, drops it, goes on from its parent: no recursion, a chain may be long.
void PrefixIndex::erase(NodeId node) {
  check(is_used(node), "the node is not in the prefix index");
  NodeId at = node;
  while (true) {
    if (nodes_[at].first_child != kNoNode) {
      at = nodes_[at].first_child;
      continue;
    }
    const Parent parent = nodes_[at].parent;
    drop_leaf(at);
    if (at == node) return;
    at = parent;
  }
}

void PrefixIndex::prune(NodeId node) {
  while (node > 0 && nodes_[node].first_child == kNoNode && !has_blocks(node)) {
    const Parent parent = nodes_[node].parent;
    drop_leaf(node);
    node = parent;
  }
}

void PrefixIndex::clear() {
  while (!roots_by_salt_.empty()) erase(roots_[roots_by_salt_.begin()->second].first_child);
}

std::pair<NodeId, int32_t> PrefixIndex::best_child(Parent parent, const int32_t* tokens,
                                                   int32_t num_tokens) const {
  std::pair<NodeId, int32_t> best{kNoNode, 0};
  const int32_t longest = std::min(num_tokens, block_size_);
  int scanned = 0;
  for (NodeId n = first_child(parent); n != kNoNode && scanned < kScanLimit; n = nodes_[n].next_sibling) {
    const int32_t* mine = tokens_of(n);
    const auto common = static_cast<int32_t>(std::mismatch(tokens, tokens + longest, mine).first - tokens);
    if (common > best.second && serves_inside(n)) best = {n, common};
    ++scanned;
  }
  return best;
}

int64_t PrefixIndex::count_children(Parent parent) const {
  int64_t count = 0;
  NodeId before = kNoNode;
  for (NodeId n = first_child(parent); n != kNoNode; before = n, n = nodes_[n].next_sibling) {
    check(nodes_[n].parent == parent, "prefix index: a child names another parent");
    check(nodes_[n].prev_sibling == before, "prefix index: sibling links disagree");
    check(++count <= size_, "prefix index: siblings form a cycle");
  }
  return count;
}

void PrefixIndex::verify_node(NodeId number) const {
  const Node& node = nodes_[number];
  if (node.parent > 0) {
    check(is_used(node.parent), "prefix index: the parent of a node is not there");
  } else {
    const int32_t slot = root_slot(node.parent);
    check(slot < static_cast<int32_t>(roots_.size()), "prefix index: a node names a root that never was");
    check(find_root(roots_[slot].salt) == node.parent, "prefix index: a node names a root that is gone");
  }
  check(node.hash == hash(node.parent, tokens_of(number)), "prefix index: a stored hash is stale");
  check(find(node.parent, tokens_of(number)) == number,
        "prefix index: a node cannot be found, or is there twice");
  check(node.first_child != kNoNode || has_blocks(number), "prefix index: a node serves nobody");
  for (int32_t s = 0; s < strips_.count(); ++s) {
    const BlockId held = block(number, s);
    check(held != kNullBlock || !strips_.is_whole(s), "prefix index: a node lacks a block");
    check(held == kNullBlock || node_of_[held] == number, "prefix index: a block names another node");
  }
}

void PrefixIndex::verify() const {
  int64_t used = 0, children = 0;
  for (NodeId n = 0; n < static_cast<NodeId>(nodes_.size()); ++n) {
    if (!is_used(n)) {
      check(nodes_[n].first_child == kNoNode, "prefix index: a node outside has children");
      check(!has_blocks(n), "prefix index: a node outside has blocks");
      continue;
    }
    verify_node(n);
    ++used;
    children += count_children(n);
  }
  for (const auto& [salt, slot] : roots_by_salt_) {
    check(roots_[slot].salt == salt, "prefix index: a root has another salt");
    check(roots_[slot].first_child != kNoNode, "prefix index: a root has no children");
    children += count_children(-(slot + 1));
  }
  for (const NodeId node : node_of_)
    check(node == kNoNode || is_used(node), "prefix index: a block names no node");
  check(!is_used(kNoNode) && !contains(kNullBlock), "prefix index: the null block is indexed");
  check(used == size_, "prefix index: the count of nodes is wrong");
  check(used + static_cast<int64_t>(free_nodes_.size()) + 1 == num_made_, "prefix index: a number is lost");
  check(children == used, "prefix index: a node is missing from its parent's children");
}

}  // namespace bequest
