// The blocks of one sequence, in order: position p lives in slot p % BS of block p / BS.
//
// Tables share blocks. A block that anybody else can see (a second table, the prefix index) is copied before
// this table writes to it; the table reports which copies the next step has to make first.
//
// An entry is a block b of the device pool as b, or a block h of a host pool as -h: a table that was swapped
// out is a mix of the two where a block shared with a table that stayed.
//
//   entries   [ b0 | b1 | b2 | b3 ]        blocks that cover the sequence's positions
//   chain     [ n0 | n1 | n2 ]             nodes of the prefix index that stand for the leading full blocks
//
// chain[i] is the node with the same tokens and history as entry i. Its block is the table's own, or an equal
// one that another sequence entered first; the table then keeps its block, and continues below the other's
// node.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cache/block_pool.h"
#include "cache/token_list.h"

namespace bequest {

struct BlockCopy {
  BlockId source;
  BlockId destination;
};

// What a block held at a time: it still does as long as its epoch is the same.
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

  // A table of the unbroken beginning of `blocks`: those that still hold what they held at their epoch.
  static BlockTable adopt(std::shared_ptr<BlockPool> pool, std::string salt, const BlockEpochs& blocks);

  // Takes the longest indexed chain of full blocks of tokens[0, limit); returns the tokens they cover.
  // REQUIRES: the table is empty
  int64_t match_prefix(const TokenList& tokens, int64_t limit);
  // Goes on inside the next block: takes the indexed block that shares the longest head with the tokens up to
  // `limit` and returns the length of that head, less than a block; 0 takes nothing. The block is another's,
  // so that the first write behind the head copies it. REQUIRES: only match_prefix() was called before
  int64_t match_partial(const TokenList& tokens, int64_t limit);

  // Blocks that try_prepare_write(begin, end) would take from the pool.
  int32_t blocks_needed(int64_t begin, int64_t end) const;
  // Makes positions [begin, end) writable and returns the copies to make first, or does nothing and returns
  // nullopt where the pool has too few blocks. From `end` on the table then holds nothing: a sequence is
  // written front to back. REQUIRES: begin <= capacity(), resident()
  std::optional<std::vector<BlockCopy>> try_prepare_write(int64_t begin, int64_t end);

  // Enters the full blocks of tokens[0, num_computed) into the prefix index. REQUIRES: they were written
  void commit(const TokenList& tokens, int64_t num_computed);
  // Takes this table's own blocks from that of position `from_token` on out of the index, and with them
  // whatever was entered below: a step that should have written them failed.
  void uncommit(int64_t from_token);

  // A table that shares every block.
  BlockTable fork() const { return slice_to(capacity()); }
  // A table that shares the blocks of positions [0, num_tokens). REQUIRES: num_tokens <= capacity()
  BlockTable slice_to(int64_t num_tokens) const;
  // Gives back the blocks behind position num_tokens. REQUIRES: num_tokens <= capacity()
  void truncate(int64_t num_tokens);
  // The first `count` blocks, which hold the same as those of `other`, become the other's.
  void share_front(const BlockTable& other, int32_t count);
  // Gives back all blocks, the last one first, so that tails are reused before heads. The table is then
  // empty.
  void free();

  BlockPool& pool() const { return *pool_; }
  const std::vector<int32_t>& entries() const { return entries_; }
  int32_t num_blocks() const { return static_cast<int32_t>(entries_.size()); }
  int64_t capacity() const { return int64_t{num_blocks()} * pool_->block_size(); }
  // Whether every block is on the device.
  bool resident() const { return num_on_host_ == 0; }
  int32_t num_on_host() const { return num_on_host_; }
  // Blocks that another table holds too.
  int32_t num_shared() const;
  // The leading blocks that are on the device, to be adopted later.
  BlockEpochs epochs() const;

 private:
  friend class TableSwap;

  int64_t blocks_covering(int64_t num_tokens) const;
  void drop_to(size_t num_entries);
  void acquire_entry(int32_t entry) const;
  void release_entry(int32_t entry) const;
  BlockId replace_for_write(size_t i, int32_t begin, std::vector<BlockCopy>& copies);
  bool commit_block(size_t i, const int32_t* tokens);

  std::shared_ptr<BlockPool> pool_;
  std::shared_ptr<BlockPool> host_;  // set while num_on_host_ > 0
  std::string salt_;
  std::vector<int32_t> entries_;
  std::vector<PrefixIndex::NodeRef> chain_;
  int32_t num_on_host_ = 0;
};

}  // namespace bequest
