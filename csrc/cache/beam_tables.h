// The block tables of a group of beams. Beams step together, one token each, and change places after every
// step, so that what a step asks of all of them is one call.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cache/block_table.h"

namespace bequest {

class BeamTables {
 public:
  // One beam, which takes over the blocks of `first`: that is empty afterwards.
  explicit BeamTables(BlockTable& first);

  // Beam i continues beam parents[i] with tokens[i], for which the next step is going to write KV. Whole
  // blocks are shared; the last heir of a beam takes over its table, and beams without an heir give theirs
  // back. REQUIRES: as many tokens as parents, none negative
  void reorder(std::span<const int32_t> parents, std::span<const int32_t> tokens);

  // At least the blocks that try_prepare_write(position) takes from the pool.
  int64_t blocks_needed(int64_t position) const;
  // Makes `position` writable in every table and returns the copies to make first, or does nothing and
  // returns nullopt where the pool has too few blocks.
  std::optional<std::vector<BlockCopy>> try_prepare_write(int64_t position);

  // Gives back all blocks; there are no beams then.
  void free();

  int32_t size() const { return static_cast<int32_t>(tables_.size()); }
  const BlockTable& table(int32_t beam) const { return tables_.at(beam); }
  // The last token of each beam. REQUIRES: reorder() was called
  const std::vector<int32_t>& tokens() const { return tokens_; }

 private:
  std::vector<BlockTable> tables_;
  std::vector<int32_t> tokens_;
};

}  // namespace bequest
