#include "attention/cuda/old_keys.h"

#include <algorithm>
#include <array>
#include <vector>

#include "cache/prefix_index.h"

namespace bequest {
namespace {

int64_t num_before(const BlockTableRows& rows, int64_t s) {
  return rows.seq_lens[s] - (rows.query_start[s + 1] - rows.query_start[s]);
}

struct FilledBlock {
  int64_t sequence;
  int64_t index;  // in its table
};

// Those that could be before the queries of another sequence.
std::vector<FilledBlock> find_filled(const BlockTableRows& rows) {
  int64_t most_before = 0;
  for (int64_t s = 0; s < rows.num_sequences; ++s) most_before = std::max(most_before, num_before(rows, s));
  std::vector<FilledBlock> filled;
  for (int64_t s = 0; s < rows.num_sequences; ++s) {
    if (rows.seq_lens[s] == 0) continue;  // padding
    const int64_t end = std::min<int64_t>(rows.seq_lens[s], most_before) / rows.block_size;
    for (int64_t i = num_before(rows, s) / rows.block_size; i < end; ++i) filled.push_back({s, i});
  }
  return filled;
}

}  // namespace

bool has_old_keys(const BlockTableRows& rows) {
  if (rows.block_tables == nullptr) return false;
  const std::vector<FilledBlock> filled = find_filled(rows);
  if (filled.empty()) return true;
  const auto block = [&](int64_t s, int64_t i) { return rows.block_tables[s * rows.max_blocks + i]; };
  // Most sequences have nothing in common with those that fill a block, not even their first one. Behind a
  // window that one may have been given back: it tells nothing.
  constexpr uint32_t kPlaces = 4096;
  std::array<bool, kPlaces> is_first{};
  bool may_be_any = false;
  for (const FilledBlock& one : filled) {
    const BlockId first = block(one.sequence, 0);
    is_first[static_cast<uint32_t>(first) % kPlaces] = true;
    may_be_any |= first == kNullBlock;
  }
  const auto may_share = [&](BlockId first) {
    return may_be_any || first == kNullBlock || is_first[static_cast<uint32_t>(first) % kPlaces];
  };
  for (int64_t s = 0; s < rows.num_sequences; ++s) {
    const int64_t before = num_before(rows, s);
    if (before < rows.block_size || !may_share(block(s, 0))) continue;
    for (const FilledBlock& one : filled)
      if (one.sequence != s && before >= (one.index + 1) * rows.block_size &&
          block(s, one.index) == block(one.sequence, one.index))
        return false;
  }
  return true;
}

}  // namespace bequest
