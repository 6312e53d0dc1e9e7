#include "cache/beam_tables.h"

#include "core/check.h"

namespace bequest {

BeamTables::BeamTables(BlockTable& first) {
  tables_.push_back(first.fork());
  first.free();
}

void BeamTables::reorder(std::span<const int32_t> parents, std::span<const int32_t> tokens) {
  check(parents.size() == tokens.size(), "a beam has one parent and one token");
  std::vector<int32_t> heirs(tables_.size());
  for (size_t i = 0; i < parents.size(); ++i) {
    check(0 <= parents[i] && parents[i] < size(), "a beam's parent is not among the beams");
    check(tokens[i] >= 0, "a token id is not negative");
    ++heirs[parents[i]];
  }
  std::vector<BlockTable> after;
  after.reserve(parents.size());
  for (const int32_t parent : parents) {
    if (--heirs[parent] == 0) {
      after.push_back(std::move(tables_[parent]));
    } else {
      after.push_back(tables_[parent].fork());
    }
  }
  tables_.swap(after);
  tokens_.assign(tokens.begin(), tokens.end());
}

int64_t BeamTables::blocks_needed(int64_t position) const {
  int64_t needed = 0;
  for (const BlockTable& table : tables_) needed += table.blocks_needed(position, position + 1);
  return needed;
}

std::optional<std::vector<BlockCopy>> BeamTables::try_prepare_write(int64_t position) {
  if (tables_.empty()) return std::vector<BlockCopy>{};
  if (blocks_needed(position) > tables_[0].pool().num_free()) return std::nullopt;
  std::vector<BlockCopy> copies;
  for (BlockTable& table : tables_) {
    const auto more = table.try_prepare_write(position, position + 1);
    check(more.has_value(), "the blocks of the beams were counted");
    copies.insert(copies.end(), more->begin(), more->end());
  }
  return copies;
}

void BeamTables::free() {
  tables_.clear();
  tokens_.clear();
}

}  // namespace bequest
