#include "attention/shared_prefix.h"

#include <algorithm>

namespace bequest {
namespace {

bool is_single(const BlockTableRows& rows, int64_t s) {
  return rows.query_start[s + 1] - rows.query_start[s] == 1 && rows.seq_lens[s] > 0;
}

// Units that sequences s and s + 1 have in common.
int32_t common_units(const BlockTableRows& rows, int64_t s, int unit) {
  if (!is_single(rows, s) || !is_single(rows, s + 1)) return 0;
  const int32_t own = std::min(rows.seq_lens[s], rows.seq_lens[s + 1]) - 1;  // the query's key is its own
  const int32_t* a = rows.block_tables + s * rows.max_blocks;
  const int32_t* end = a + std::min<int64_t>(own / rows.block_size, rows.max_blocks);
  const int64_t blocks = std::mismatch(a, end, a + rows.max_blocks).first - a;
  return static_cast<int32_t>(blocks * rows.block_size / unit);
}

// Finds the cut by looking at the sequences one after the other: the best cut of the first n of them ends
// with a sequence by itself or with a run, whose length is what all of its neighbours have in common.
class RunFinder {
 public:
  // common[s]: units of sequences s and s + 1.
  explicit RunFinder(const std::vector<int32_t>& common)
      : common_(common), spared_(common.size() + 2), run_start_(common.size() + 2, -1) {
    for (int32_t last = 1; last <= static_cast<int32_t>(common.size()); ++last) {
      lower_to(common_[last - 1], last - 1);
      const int32_t count = last + 1;
      spared_[count] = spared_[last];
      for (const Level& level : levels_) {
        const int64_t spared = level.value + int64_t{level.common} * last;
        if (spared >= spared_[count] && spared > 0) {
          spared_[count] = spared;
          run_start_[count] = level.start;
        }
      }
    }
  }

  std::vector<SharedRun> runs(int unit) const {
    std::vector<SharedRun> found;
    for (auto count = static_cast<int32_t>(common_.size()) + 1; count > 1;) {
      const int32_t first = run_start_[count];
      if (first < 0) {
        --count;
        continue;
      }
      const int32_t units = *std::min_element(common_.begin() + first, common_.begin() + count - 1);
      found.push_back({first, count - first, units * unit});
      count = first;
    }
    std::reverse(found.begin(), found.end());
    return found;
  }

 private:
  // Where a run may have begun that has `common` units up to the sequence looked at. Of all these places the
  // best is known: what is spared before it and, with `common` more for each further sequence, in it.
  struct Level {
    int32_t common;
    int32_t earliest;
    int32_t start;
    int64_t value;  // spared before `start`, less common * start
  };

  int64_t value(int32_t start, int32_t common) const { return spared_[start] - int64_t{common} * start; }

  // Runs that go on have no more in common than `common`; one may begin at `start`.
  void lower_to(int32_t common, int32_t start) {
    if (common == 0) return levels_.clear();
    Level level{common, start, start, value(start, common)};
    while (!levels_.empty() && levels_.back().common >= common) {
      const Level& higher = levels_.back();
      const bool same = higher.common == common;  // then its best is known, which is the rule
      for (int32_t s = same ? higher.start : level.earliest - 1; s >= higher.earliest; --s) {
        if (value(s, common) >= level.value) level.start = s, level.value = value(s, common);
        if (same) break;
      }
      level.earliest = higher.earliest;
      levels_.pop_back();
    }
    levels_.push_back(level);
  }

  const std::vector<int32_t>& common_;  // [S - 1]
  std::vector<int64_t> spared_;         // [S + 1] units that the best cut of the first n sequences spares
  std::vector<int32_t> run_start_;      // [S + 1] where its last run begins, -1: the last is by itself
  std::vector<Level> levels_;           // growing in `common` and in `start`
};

}  // namespace

std::vector<SharedRun> find_shared_runs(const BlockTableRows& rows, int unit) {
  if (rows.block_tables == nullptr || rows.num_sequences < 2) return {};
  std::vector<int32_t> common(rows.num_sequences - 1);
  for (int64_t s = 0; s + 1 < rows.num_sequences; ++s) common[s] = common_units(rows, s, unit);
  if (std::all_of(common.begin(), common.end(), [](int32_t units) { return units == 0; })) return {};
  return RunFinder(common).runs(unit);
}

}  // namespace bequest
