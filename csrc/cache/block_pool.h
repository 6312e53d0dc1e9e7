// Blocks of KV memory by number: who holds them, which may be reused, what they still hold.
//
// Owner: the event-loop thread; no locks. The memory itself belongs to the device thread, which follows the
// plans made from these numbers. Block 0 is the null block: it pads tables and is never handed out.
//
// A block is in use (references > 0) or on the free list, oldest first. A freed block keeps its content and
// stays findable, through the prefix index or by (block, epoch), until it is handed out again from the old
// end. The epoch counts the times its content was replaced.
//
// Blocks that were never handed out are older than all others and go first, by number. Nothing is written
// about them, so that a pool of any size is made at once.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cache/prefix_index.h"
#include "cache/strips.h"

namespace bequest {

class BlockPool {
 public:
  // `hash_bits` is the prefix index's, for tests.
  BlockPool(int32_t num_blocks, int32_t block_size, Strips strips, bool prefix_index = true,
            int hash_bits = 32);
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  const Strips& strips() const { return strips_; }
  int32_t num_blocks() const { return num_blocks_; }
  int32_t block_size() const { return block_size_; }
  int32_t num_free() const { return num_free_; }
  int32_t num_used() const { return num_blocks() - 1 - num_free_; }
  int32_t ref_count(BlockId block) const { return at(block).references; }
  uint64_t epoch(BlockId block) const { return at(block).epoch; }
  bool full(BlockId block) const { return at(block).filled == block_size_; }

  // The oldest free block, with one reference; its old content is gone. REQUIRES: num_free() > 0
  BlockId allocate();
  // One more reference on a block that is in use or free.
  void acquire(BlockId block);
  // The same if the block still holds what it held at `epoch`.
  bool try_revive(BlockId block, uint64_t epoch);
  // Gives a reference back; the last one puts the block at the young end of the free list. REQUIRES: it is
  // held
  void release(BlockId block);

  // Planning of a step. Its swaps and copies run before its forward, side by side, whatever the order in
  // which they were planned. So between begin_plan() and end_plan()
  //   - a block that one of them reads is not handed out again: release_source() keeps the reference till the
  //   end;
  //   - slots that the forward writes, or a copy fills, are not to be copied, and blocks that it writes, or
  //   that come in from the other pool, are not to be swapped out: the block is pending().
  // Without an open plan release_source() is release() and nothing is pending.
  void begin_plan();
  void end_plan();
  void release_source(BlockId block);
  bool pending(BlockId block) const { return planning_ && at(block).written_in_plan == plan_; }
  // Slots [0, settled_slots) of the block are what they will stay when the copies of the open plan read them.
  int32_t settled_slots(BlockId block) const { return pending(block) ? at(block).written_from : block_size_; }

  // Whether writing would be seen by nobody but the one owner: not by a second one, not through the index.
  bool writable(BlockId block) const { return at(block).references == 1 && !indexed(block); }
  // Slots [begin, end) of the block are written next, and what was behind them counts no more. Replacing
  // content starts a new epoch. REQUIRES: writable(block)
  void note_write(BlockId block, int32_t begin, int32_t end);
  // `block` becomes a copy of block `source` of pool `from`, before the plan's other copies are made.
  void note_arrival(BlockId block, const BlockPool& from, BlockId source);

  // Null in a pool made without one.
  PrefixIndex* index() const { return index_.get(); }
  bool indexed(BlockId block) const { return index_ && index_->contains(block); }
  // REQUIRES: indexed(block)
  int32_t indexed_strip(BlockId block) const { return index_->strip_of(block); }
  void clear_index();

  // Throws Error, naming the first invariant that does not hold.
  void verify() const;

 private:
  struct Block {
    int32_t references = 0;
    int32_t filled = 0;         // slots [0, filled) were written since it was handed out
    BlockId next = kNullBlock;  // on the free list, younger
    BlockId prev = kNullBlock;  // on the free list, older
    uint64_t epoch = 0;
    uint64_t written_in_plan = 0;
    int32_t written_from = 0;  // the first slot that plan writes or fills by a copy
  };

  bool fresh(BlockId block) const { return static_cast<size_t>(block) >= blocks_.size(); }
  const Block& at(BlockId block) const;
  Block& at(BlockId block);  // REQUIRES: it was handed out
  void push_youngest(BlockId block);
  void unlink(BlockId block);

  const int32_t num_blocks_;
  const int32_t block_size_;
  const Strips strips_;
  int32_t num_free_ = 0;
  bool planning_ = false;
  uint64_t plan_ = 0;  // counts plans; the one that is open, or was last
  // Those that were handed out, behind the null block, which is the head of their circular free list.
  std::vector<Block> blocks_;
  std::vector<BlockId> sources_;  // references kept until end_plan()
  std::unique_ptr<PrefixIndex> index_;
};

}  // namespace bequest
