#include "ops/cpu/beam_candidates.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>
#include <vector>

#include "core/check.h"
#include "core/threads.h"
#include "ops/cpu/vocab_select.h"

namespace bequest {
namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr float kHighest = std::numeric_limits<float>::max();

struct Row {
  std::vector<Candidate> best;  // edited logits, best first
  double log_sum = 0;
};

struct Scratch {
  std::vector<float> logits;
  SelectScratch select;
};

bool is_allowed(const BeamGroup& group, int32_t token) {
  return group.allowed == nullptr || (group.allowed[token / 32] >> (token % 32) & 1) != 0;
}

float edited(const BeamGroup& group, float logit, int32_t token) {
  if (!is_allowed(group, token)) return kMasked;
  const int32_t* end = group.edit_ids + group.num_edits;
  const int32_t* at = std::lower_bound(group.edit_ids, end, token);
  return at != end && *at == token ? logit + group.edit_values[at - group.edit_ids] : logit;
}

// What may follow `node`, with their edited logits.
void collect_children(const BeamGroup& group, const float* logits, int32_t node,
                      std::vector<Candidate>& found) {
  const CatalogueRule& rule = group.rule;
  const CatalogueView& tree = rule.tree;
  found.clear();
  const auto offer = [&](int32_t token) {
    const float value = edited(group, logits[token], token);
    if (value >= kLowest) found.push_back({value, token});
  };
  for (int32_t i = tree.begin(node); i < tree.end(node); ++i) offer(tree.tokens[i]);
  if (!tree.is_terminal(node)) return;
  for (int32_t i = 0; i < rule.num_ends; ++i)
    if (tree.child(node, rule.end_tokens[i]) < 0) offer(rule.end_tokens[i]);
}

const float* edit_all(const BeamGroup& group, const float* logits, int64_t vocab_size,
                      std::vector<float>& scratch) {
  if (group.allowed == nullptr && group.num_edits == 0) return logits;
  scratch.assign(logits, logits + vocab_size);
  if (group.allowed != nullptr)
    for (int64_t i = 0; i < vocab_size; ++i)
      if (!is_allowed(group, static_cast<int32_t>(i))) scratch[i] = kMasked;
  for (int32_t i = 0; i < group.num_edits; ++i) scratch[group.edit_ids[i]] += group.edit_values[i];
  return scratch.data();
}

// Whether the row has a softmax; only then it has candidates.
bool rank_row(const BeamCandidateParams& p, const BeamGroup& group, int64_t r, Scratch& scratch, Row& row) {
  const float* logits = p.logits + r * p.stride;
  const RowMax found = scan_max(logits, p.vocab_size);
  if (!found.finite || std::isnan(p.cumulative[r])) return false;
  row.log_sum = found.max + std::log(sum_exp(logits, p.vocab_size, found.max, 1.0f, kMasked));
  auto& best = scratch.select.candidates;
  if (group.rule.restricts()) {
    collect_children(group, logits, p.nodes[r], best);
    if (static_cast<int64_t>(best.size()) > group.k) {
      std::nth_element(best.begin(), best.begin() + (group.k - 1), best.end(), better);
      best.resize(group.k);
    }
  } else {
    const float* x = edit_all(group, logits, p.vocab_size, scratch.logits);
    select_top(x, p.vocab_size, group.k, kLowest, scratch.select);
  }
  std::sort(best.begin(), best.end(), better);
  row.best.assign(best.begin(), best.end());
  return true;
}

struct Continuation {
  float score;
  int32_t row;   // in the group
  int32_t rank;  // in the row
};

struct Worse {
  bool operator()(const Continuation& a, const Continuation& b) const {
    if (a.score != b.score) return a.score < b.score;
    return a.row != b.row ? a.row > b.row : a.rank > b.rank;
  }
};

// Writes the candidate at [g, i].
void write(const BeamCandidateParams& p, int64_t g, int64_t i, const Continuation& best, const Row& row) {
  const int64_t at = g * p.out.columns + i;
  const int32_t token = row.best[best.rank].id;
  const float logit = p.logits[(p.group_start[g] + best.row) * p.stride + token];
  p.out.score[at] = best.score;
  p.out.row[at] = best.row;
  p.out.token[at] = token;
  p.out.logprob[at] = static_cast<float>(logit - row.log_sum);
}

// Takes the best of the rows' heads, k times.
void merge_group(const BeamCandidateParams& p, int64_t g, const Row* rows) {
  const float* cumulative = p.cumulative + p.group_start[g];
  const int32_t num_rows = p.group_start[g + 1] - p.group_start[g];
  std::priority_queue<Continuation, std::vector<Continuation>, Worse> heads;
  const auto push = [&](int32_t r, int32_t rank) {
    if (rank == static_cast<int32_t>(rows[r].best.size())) return;
    const float score = cumulative[r] + static_cast<float>(rows[r].best[rank].value - rows[r].log_sum);
    if (score >= kLowest) heads.push({score, r, rank});
  };
  for (int32_t r = 0; r < num_rows; ++r) push(r, 0);
  int64_t count = 0;
  for (; count < p.groups[g].k && !heads.empty(); ++count) {
    const Continuation best = heads.top();
    heads.pop();
    write(p, g, count, best, rows[best.row]);
    push(best.row, best.rank + 1);
  }
  const int64_t at = g * p.out.columns + count;
  const int64_t padding = p.out.columns - count;
  std::fill_n(p.out.score + at, padding, kMasked);
  std::fill_n(p.out.logprob + at, padding, kMasked);
  std::fill_n(p.out.row + at, padding, -1);
  std::fill_n(p.out.token + at, padding, -1);
}

void check_groups(const BeamCandidateParams& p) {
  check(p.group_start[0] == 0, "beam_candidates: the first group does not begin at row 0");
  for (int64_t g = 0; g < p.num_groups; ++g) {
    const BeamGroup& group = p.groups[g];
    check(p.group_start[g] <= p.group_start[g + 1], "beam_candidates: group_start descends");
    check(group.k >= 0 && group.k <= std::min<int64_t>(kMaxBeamCandidates, p.out.columns),
          "beam_candidates: k out of range");
    for (int32_t i = 0; i < group.num_edits; ++i)
      check(group.edit_ids[i] >= 0 && group.edit_ids[i] < p.vocab_size &&
                (i == 0 || group.edit_ids[i - 1] < group.edit_ids[i]),
            "beam_candidates: edits do not ascend in the vocabulary");
    for (int32_t i = 0; i < group.num_edits; ++i)
      check(group.edit_values[i] <= kHighest, "beam_candidates: an edit is NaN or +inf");
    if (!group.rule.restricts()) continue;
    for (int32_t i = 0; i < group.rule.num_ends; ++i)
      check(group.rule.end_tokens[i] >= 0 && group.rule.end_tokens[i] < p.vocab_size,
            "beam_candidates: an end token is outside the vocabulary");
    check(p.nodes != nullptr, "beam_candidates: a catalogue without nodes");
    for (int32_t r = p.group_start[g]; r < p.group_start[g + 1]; ++r)
      check(group.rule.tree.contains(p.nodes[r]), "beam_candidates: a node is not in the catalogue");
  }
}

}  // namespace

void beam_candidates(const BeamCandidateParams& p) {
  check_groups(p);
  const int64_t num_rows = p.group_start[p.num_groups];
  std::vector<Row> rows(num_rows);
  std::vector<int32_t> group_of(num_rows);
  for (int64_t g = 0; g < p.num_groups; ++g)
    std::fill(group_of.begin() + p.group_start[g], group_of.begin() + p.group_start[g + 1],
              static_cast<int32_t>(g));
  const int workers = num_threads();
  std::vector<Scratch> scratch(workers);
  for_each_item(num_rows, [&](int64_t r, int worker) {
    const BeamGroup& group = p.groups[group_of[r]];
    p.out.bad[r] = group.k > 0 && !rank_row(p, group, r, scratch[worker], rows[r]);
  });
  for_each_item(p.num_groups, [&](int64_t g, int) { merge_group(p, g, rows.data() + p.group_start[g]); });
}

}  // namespace bequest
