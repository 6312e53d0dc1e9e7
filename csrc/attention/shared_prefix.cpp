#include "attention/shared_prefix.h"

#include <algorithm>
#include <numeric>

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

// Neighbours that have been looked at together: the units that the best cut of them spares.
struct Stretch {
  int32_t first;
  int32_t last;
  int64_t spared = 0;
  bool whole = true;  // is one run, or one sequence
};

// What neighbours have in common only shrinks when more of them are taken together. So stretches are joined
// at the edge that has most in common, then at the next: a stretch is one run if that spares at least what
// its two parts spare.
class RunFinder {
 public:
  explicit RunFinder(std::vector<int32_t> common) : common_(std::move(common)), joined_(common_.size()) {
    const auto count = static_cast<int32_t>(common_.size()) + 1;
    at_.resize(count);
    for (int32_t s = 0; s < count; ++s) at_[s] = {s, s};
  }

  void join_all() {
    std::vector<int32_t> edges(common_.size());
    std::iota(edges.begin(), edges.end(), 0);
    std::erase_if(edges, [&](int32_t edge) { return common_[edge] == 0; });
    std::stable_sort(edges.begin(), edges.end(),
                     [&](int32_t a, int32_t b) { return common_[a] > common_[b]; });
    for (const int32_t edge : edges) join(edge);
  }

  bool joined(int64_t edge) const { return joined_[edge] != 0; }

 private:
  void join(int32_t edge) {
    const Stretch left = at_[edge], right = at_[edge + 1];  // a stretch is kept at both of its ends
    Stretch both{left.first, right.last, left.spared + right.spared, false};
    const int64_t as_one = int64_t{common_[edge]} * (both.last - both.first);
    if (as_one >= both.spared) {
      both.spared = as_one;
      both.whole = true;
      joined_[edge] = 1;
      for (const Stretch& part : {left, right})
        if (!part.whole) std::fill(joined_.begin() + part.first, joined_.begin() + part.last, 1);
    }
    at_[both.first] = at_[both.last] = both;
  }

  const std::vector<int32_t> common_;  // [S - 1]
  std::vector<uint8_t> joined_;        // [S - 1]
  std::vector<Stretch> at_;            // [S]
};

}  // namespace

std::vector<SharedRun> find_shared_runs(const BlockTableRows& rows, int unit) {
  std::vector<SharedRun> runs;
  if (rows.block_tables == nullptr || rows.num_sequences < 2) return runs;
  std::vector<int32_t> common(rows.num_sequences - 1);
  for (int64_t s = 0; s + 1 < rows.num_sequences; ++s) common[s] = common_units(rows, s, unit);
  if (std::all_of(common.begin(), common.end(), [](int32_t units) { return units == 0; })) return runs;

  RunFinder finder(common);
  finder.join_all();
  for (int32_t first = 0; first + 1 < rows.num_sequences;) {
    int32_t last = first, least = INT32_MAX;
    while (last + 1 < rows.num_sequences && finder.joined(last)) least = std::min(least, common[last++]);
    if (last > first) runs.push_back({first, last - first + 1, least * unit});
    first = last + 1;
  }
  return runs;
}

}  // namespace bequest
