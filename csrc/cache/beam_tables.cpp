#include "cache/beam_tables.h"

#include <algorithm>

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

int32_t BeamTables::end(std::span<const int32_t> rows) {
  const auto first = static_cast<int32_t>(ended_.size());
  for (const int32_t row : rows) check(0 <= row && row < size(), "a beam that ends is not among the beams");
  for (const int32_t row : rows) ended_.emplace_back(tables_[row].fork());
  return first;
}

BlockTable BeamTables::take_ended(int32_t place) {
  std::optional<BlockTable>& table = ended_.at(place);
  check(table.has_value(), "an ended beam is taken once");
  BlockTable taken = std::move(*table);
  table.reset();
  return taken;
}

const BlockTable& BeamTables::ended_at(int32_t place) const {
  check(ended_.at(place).has_value(), "the blocks of an ended beam were taken");
  return *ended_[place];
}

BeamEpochs BeamTables::epochs(std::span<const int32_t> places, std::span<const int32_t> rows,
                              std::span<const int32_t> num_tokens) const {
  check(places.size() == num_tokens.size() && rows.size() == num_tokens.size(),
        "a beam has one place, one row and one length");
  BeamEpochs epochs;
  if (places.empty()) return epochs;
  std::vector<const BlockTable*> tables;
  std::vector<size_t> counts;  // entries of each that count
  for (size_t i = 0; i < places.size(); ++i) {
    const BlockTable& table = places[i] == kNoPlace ? tables_.at(rows[i]) : ended_at(places[i]);
    const int64_t bs = table.pool().block_size();
    const size_t wanted = (num_tokens[i] + bs - 1) / bs * table.num_strips();
    tables.push_back(&table);
    counts.push_back(table.num_known(wanted));
  }
  size_t shared = counts[0];
  for (size_t i = 1; i < tables.size(); ++i) {
    const auto begin = tables[0]->entries().begin();
    const auto end = begin + static_cast<std::ptrdiff_t>(std::min(shared, counts[i]));
    shared = std::mismatch(begin, end, tables[i]->entries().begin()).first - begin;
  }
  epochs.front = tables[0]->epochs(0, shared);
  epochs.tails.reserve(tables.size());
  for (size_t i = 0; i < tables.size(); ++i) epochs.tails.push_back(tables[i]->epochs(shared, counts[i]));
  return epochs;
}

void BeamTables::free() {
  tables_.clear();
  ended_.clear();
  tokens_.clear();
}

}  // namespace bequest
