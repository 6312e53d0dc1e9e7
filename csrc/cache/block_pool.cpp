#include "cache/block_pool.h"

#include <algorithm>

#include <utility>

#include "core/check.h"

namespace bequest {

BlockPool::BlockPool(int32_t num_blocks, int32_t block_size, Strips strips, bool prefix_index, int hash_bits)
    : num_blocks_(num_blocks),
      block_size_(block_size),
      strips_(std::move(strips)),
      num_free_(num_blocks - 1) {
  check(num_blocks >= 1, "a pool has at least the null block");
  check(block_size >= 1, "a block has at least one slot");
  blocks_.reserve(num_blocks);  // of addresses: memory is taken as blocks are handed out
  blocks_.emplace_back();
  if (prefix_index) index_ = std::make_unique<PrefixIndex>(num_blocks, block_size, strips_, hash_bits);
}

const BlockPool::Block& BlockPool::at(BlockId block) const {
  static const Block kFresh;
  check(0 < block && block < num_blocks_, "no such block");
  return fresh(block) ? kFresh : blocks_[block];
}

BlockPool::Block& BlockPool::at(BlockId block) {
  check(0 < block && block < num_blocks_, "no such block");
  check(!fresh(block), "a block that nobody holds or has held");
  return blocks_[block];
}

void BlockPool::push_youngest(BlockId block) {
  Block& head = blocks_[kNullBlock];
  blocks_[block].prev = head.prev;
  blocks_[block].next = kNullBlock;
  blocks_[head.prev].next = block;
  head.prev = block;
  ++num_free_;
}

void BlockPool::unlink(BlockId block) {
  const auto [prev, next] = std::pair(blocks_[block].prev, blocks_[block].next);
  blocks_[prev].next = next;
  blocks_[next].prev = prev;
  --num_free_;
}

BlockId BlockPool::allocate() {
  check(num_free_ > 0, "the pool has no free block");
  const bool take_fresh = fresh(num_blocks_ - 1);
  const BlockId block = take_fresh ? static_cast<BlockId>(blocks_.size()) : blocks_[kNullBlock].next;
  if (take_fresh) {
    blocks_.emplace_back();
    --num_free_;
  } else {
    if (indexed(block)) index_->drop_block(block);
    unlink(block);
  }
  Block& b = blocks_[block];
  b.references = 1;
  b.filled = 0;
  ++b.epoch;
  return block;
}

void BlockPool::acquire(BlockId block) {
  if (at(block).references++ == 0) unlink(block);
}

bool BlockPool::try_revive(BlockId block, uint64_t epoch) {
  if (std::as_const(*this).at(block).epoch != epoch) return false;
  acquire(block);
  return true;
}

void BlockPool::release(BlockId block) {
  check(ref_count(block) > 0, "a block that nobody holds was released");
  if (--at(block).references == 0) push_youngest(block);
}

void BlockPool::begin_plan() {
  check(!planning_, "the plan before this one is still open");
  planning_ = true;
  ++plan_;
}

void BlockPool::end_plan() {
  check(planning_, "no plan is open");
  planning_ = false;
  for (const BlockId block : sources_) release(block);
  sources_.clear();
}

void BlockPool::release_source(BlockId block) {
  if (planning_) {
    sources_.push_back(block);
  } else {
    release(block);
  }
}

void BlockPool::note_write(BlockId block, int32_t begin, int32_t end) {
  check(writable(block), "a block that others can see was to be written");
  Block& b = at(block);
  if (begin < b.filled) ++b.epoch;
  b.filled = end;
  if (!planning_) return;
  b.written_from = b.written_in_plan == plan_ ? std::min(b.written_from, begin) : begin;
  b.written_in_plan = plan_;
}

void BlockPool::note_arrival(BlockId block, const BlockPool& from, BlockId source) {
  Block& b = at(block);
  b.filled = from.at(source).filled;
  if (!planning_) return;
  b.written_from = block_size_;
  b.written_in_plan = plan_;
}

void BlockPool::clear_index() {
  if (index_) index_->clear();
}

void BlockPool::verify() const {
  int64_t listed = 0;
  BlockId before = kNullBlock;
  for (BlockId b = blocks_[kNullBlock].next; b != kNullBlock; before = b, b = blocks_[b].next) {
    check(blocks_[b].references == 0, "block pool: a block in use is on the free list");
    check(blocks_[b].prev == before, "block pool: free list links disagree");
    check(++listed < num_blocks(), "block pool: the free list forms a cycle");
  }
  check(blocks_[kNullBlock].prev == before, "block pool: the young end of the free list is wrong");
  check(blocks_[kNullBlock].references == 0, "block pool: somebody holds the null block");
  const auto known = static_cast<BlockId>(blocks_.size());
  check(listed + num_blocks_ - known == num_free_, "block pool: the count of free blocks is wrong");
  int64_t free = 0;
  for (BlockId b = 1; b < known; ++b) {
    check(blocks_[b].references >= 0, "block pool: a negative reference count");
    check(0 <= blocks_[b].filled && blocks_[b].filled <= block_size_,
          "block pool: a block is filled too far");
    check(!indexed(b) || blocks_[b].filled == block_size_, "block pool: an indexed block is not full");
    free += blocks_[b].references == 0;
  }
  check(free == listed, "block pool: an unused block is not on the free list");
  check(planning_ || sources_.empty(), "block pool: copy sources are kept without a plan");
  if (index_) index_->verify();
}

}  // namespace bequest
