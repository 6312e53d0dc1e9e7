// The blocks of one sequence, in order: position p lives in slot p % BS of the blocks in row p / BS.
//
// A row has one block for each strip of the cache (strips.h). Where a strip has a window, rows that slid out
// of it have the null block instead: try_prepare_write() gives back what nobody needs who goes on from there.
//
// Tables share blocks. A block that anybody else can see (a second table, the prefix index) is copied before
// this table writes to it; the table reports which copies the next step has to make first.
//
// An entry is a block b of the device pool as b, or a block h of a host pool as -h: a table that was swapped
// out is a mix of the two where a block shared with a table that stayed.
//
//   entries   [ b0 | b1 | b2 | b3 ]        blocks that cover the sequence's positions, row by row
//   chain     [ n0 | n1 | n2 ]             nodes of the prefix index that stand for the leading full rows
//
// chain[i] is the node with the same tokens and history as row i. Its blocks are the table's own, or equal
// ones that another sequence entered first; the table then keeps its blocks, and continues below the other's
// node.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cache/block_pool.h"
#include "cache/strips.h"
#include "cache/token_list.h"

namespace bequest {

struct BlockCopy {
  BlockId source;
  BlockId destination;
};

// What a block held at a time: it still does as long as its epoch is the same. The null block holds nothing.
struct BlockEpoch {
  BlockId block;
  uint64_t epoch;

  bool operator==(const BlockEpoch&) const = default;
};
using BlockEpochs = std::vector<BlockEpoch>;

class BlockTable {
 public:
  BlockTable(std::shared_ptr<BlockPool> pool, std::string salt);
  ~BlockTable() { free(); }
  BlockTable(BlockTable&&) = default;
  BlockTable(const BlockTable&) = delete;
  BlockTable& operator=(const BlockTable&) = delete;

  // A table of the unbroken beginning of `blocks`, which are rows: those that still hold what they held at
  // their epoch. Where a window has lost one, the null block stands for it.
  static BlockTable adopt(std::shared_ptr<BlockPool> pool, std::string salt, const BlockEpochs& blocks);

  // Takes the longest indexed chain of full rows of tokens[0, limit) from which a sequence can go on, and
  // returns the tokens they cover. REQUIRES: the table is empty
  int64_t match_prefix(const TokenList& tokens, int64_t limit);
  // Goes on inside the next row: takes the indexed one that shares the longest head with the tokens up to
  // `limit` and returns the length of that head, less than a block; 0 takes nothing. The blocks are
  // another's, so that the first write behind the head copies them. REQUIRES: only match_prefix() was called
  // before
  int64_t match_partial(const TokenList& tokens, int64_t limit);

  // What it keeps of its windows from now on. It does not bring back what it gave back.
  void keep(const Keeping& keeping);
  // Gives back what slid out of the windows of a sequence that goes on at `position`, and is not kept.
  void slide(int64_t position);
  // The most tokens up to `limit` that are there for a sequence to go on behind them.
  int64_t servable(int64_t limit) const;
  // Of `num_tokens` tokens those that do not end in slots which only the open plan fills: these cannot be
  // copied. REQUIRES: num_tokens <= capacity()
  int64_t copyable(int64_t num_tokens) const;

  // Blocks that try_prepare_write(begin, end) would take from the pool.
  int32_t blocks_needed(int64_t begin, int64_t end) const;
  // Device blocks that must be free for a sequence that goes on at `computed` to reach `num_tokens`: those it
  // has on the host come back, and windows grow no further than they reach.
  int64_t blocks_to_reach(int64_t computed, int64_t num_tokens) const;
  // Makes positions [begin, end) writable and returns the copies to make first, or does nothing and returns
  // nullopt where the pool has too few blocks. What slid out of the windows at `begin` is given back in any
  // case. From `end` on the table then holds nothing: a sequence is written front to back.
  // REQUIRES: begin <= capacity(), resident()
  std::optional<std::vector<BlockCopy>> try_prepare_write(int64_t begin, int64_t end);
  // The same where there is room, without giving back what slid out; appends to `copies`.
  // REQUIRES: the pool has blocks_needed(begin, end)
  void prepare_write(int64_t begin, int64_t end, std::vector<BlockCopy>& copies);
  // Appends rows for positions up to `num_tokens`, with a block of its own wherever `present` says so, entry
  // by entry, or does nothing and returns false where the pool has too few blocks.
  bool try_append(const std::vector<bool>& present, int64_t num_tokens);

  // Enters the full rows of tokens[0, num_computed) into the prefix index. REQUIRES: they were written
  void commit(const TokenList& tokens, int64_t num_computed);
  // Takes this table's own blocks from that of position `from_token` on out of the index, and with them
  // whatever was entered below: a step that should have written them failed.
  void uncommit(int64_t from_token);

  // A table that shares every block.
  BlockTable fork() const { return slice_to(capacity()); }
  // A table that shares the blocks of positions [0, num_tokens). REQUIRES: num_tokens <= capacity()
  BlockTable slice_to(int64_t num_tokens) const;
  // Takes the rows out that may still be written: all but the last full ones. They are a table of their own,
  // in which position p is p - capacity(). REQUIRES: resident(), no strip slides
  BlockTable split_tail();
  // Shares the blocks of `tail` behind its own. REQUIRES: of the same pool, both resident()
  void append(const BlockTable& tail);
  // Gives back the blocks behind position num_tokens. REQUIRES: num_tokens <= capacity()
  void truncate(int64_t num_tokens);
  // The blocks of the first `count` rows, which hold the same as those of `other`, become the other's.
  void share_front(const BlockTable& other, int32_t count);
  // Gives back all blocks, the last one first, so that tails are reused before heads. The table is then
  // empty.
  void free();

  BlockPool& pool() const { return *pool_; }
  // [rows, strips], flat; 0 where a window has nothing any more.
  const std::vector<int32_t>& entries() const { return entries_; }
  int32_t num_strips() const { return strips().count(); }
  int64_t num_rows() const { return static_cast<int64_t>(entries_.size()) / num_strips(); }
  int64_t capacity() const { return num_rows() * pool_->block_size(); }
  // Blocks that it holds.
  int32_t num_held() const;
  // Whether every block is on the device.
  bool resident() const { return num_on_host_ == 0; }
  int32_t num_on_host() const { return num_on_host_; }
  // Blocks that another table holds too.
  int32_t num_shared() const;
  // The leading rows that are on the device, to be adopted later.
  BlockEpochs epochs() const { return epochs(0, num_known(entries_.size())); }
  // The same of entries [begin, end) alone. REQUIRES: end <= num_known(end)
  BlockEpochs epochs(size_t begin, size_t end) const;
  // Of the first `most` entries those that epochs() has: up to a row of which something is on the host.
  size_t num_known(size_t most) const;

 private:
  friend class TableSwap;

  const Strips& strips() const { return pool_->strips(); }
  int64_t rows_covering(int64_t num_tokens) const;
  int32_t entry(int64_t row, int32_t strip) const { return entries_[row * num_strips() + strip]; }
  bool is_kept(int64_t row, int32_t strip, int64_t position) const;
  void take_rows(const std::vector<NodeId>& nodes);
  int64_t last_served(int32_t strip, int64_t limit) const;
  void drop_to(size_t num_entries);
  void acquire_entry(int32_t entry) const;
  void release_entry(int32_t entry) const;
  void prepare_entry(size_t i, int32_t begin, int32_t end, std::vector<BlockCopy>& copies);
  BlockId replace_for_write(size_t i, int32_t begin, std::vector<BlockCopy>& copies);
  bool commit_row(size_t row, const int32_t* tokens);
  bool owns_row(size_t row, NodeId node) const;

  std::shared_ptr<BlockPool> pool_;
  std::shared_ptr<BlockPool> host_;  // set while num_on_host_ > 0
  std::string salt_;
  std::vector<int32_t> entries_;
  std::vector<PrefixIndex::NodeRef> chain_;
  int32_t num_on_host_ = 0;
  Keeping keeping_;
  std::vector<int64_t> num_slid_;  // [strips] leading rows that gave back what they had to; empty: none did
};

}  // namespace bequest
