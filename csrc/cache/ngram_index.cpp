#include "cache/ngram_index.h"

#include <algorithm>

#include "core/check.h"

namespace bequest {

NgramIndex::NgramIndex(int64_t n) : n_(static_cast<size_t>(n)), latest_(64, 0) {
  check(n > 0, "an n-gram has at least one token");
}

void NgramIndex::learn(const TokenList& list) {
  check(list.size() >= text_.size(), "a text that was learnt has become shorter");
  const size_t known = text_.size();
  text_.insert(text_.end(), list.data() + known, list.data() + list.size());
  earlier_.resize(text_.size(), 0);
  if (text_.size() > latest_.size()) {
    rebuild();
    return;
  }
  for (size_t end = std::max(known + 1, n_); end <= text_.size(); ++end) enter(end);
}

std::vector<int32_t> NgramIndex::follow(const TokenList& list, size_t most) const {
  const Place best = find(list);
  std::vector<int32_t> found;
  if (best.run == 0) return found;
  found.reserve(most);
  for (size_t i = best.end; found.size() < most; ++i)
    found.push_back(i < text_.size() ? text_[i] : found[i - text_.size()]);
  return found;
}

NgramIndex::Place NgramIndex::find(const TokenList& list) const {
  Place best;
  if (list.size() < n_) return best;
  int32_t end = latest_[hash(list.data() + list.size() - n_) & (latest_.size() - 1)];
  for (int i = 0; end != 0 && i < kMostPlaces; ++i, end = earlier_[end - 1]) {
    if (static_cast<size_t>(end) == text_.size()) continue;  // nothing is behind it
    const size_t length = run_length(list, end);
    if (length >= n_ && length > best.run) best = {static_cast<size_t>(end), length};
  }
  return best;
}

uint32_t NgramIndex::hash(const int32_t* tokens) const {
  uint64_t mixed = 0;
  for (size_t i = 0; i < n_; ++i) mixed = (mixed ^ static_cast<uint32_t>(tokens[i])) * 0x9E3779B97F4A7C15ull;
  return static_cast<uint32_t>(mixed >> 32);
}

void NgramIndex::enter(size_t end) {
  int32_t& latest = latest_[hash(text_.data() + end - n_) & (latest_.size() - 1)];
  earlier_[end - 1] = latest;
  latest = static_cast<int32_t>(end);
}

void NgramIndex::rebuild() {
  size_t size = latest_.size();
  while (size < text_.size()) size *= 2;
  latest_.assign(2 * size, 0);
  for (size_t end = n_; end <= text_.size(); ++end) enter(end);
}

// Tokens before `end` that are those at the end of the list.
size_t NgramIndex::run_length(const TokenList& list, size_t end) const {
  const size_t most = std::min({list.size(), end, kLongestRun});
  size_t length = 0;
  while (length < most && text_[end - 1 - length] == list[list.size() - 1 - length]) ++length;
  return length;
}

}  // namespace bequest
