#include "cache/suffix_index.h"

#include <algorithm>

#include "core/check.h"

namespace bequest {
namespace {

// Of n tokens, the first of them first.
template <class At>
uint32_t hash_of(size_t n, At at) {
  uint64_t mixed = 0;
  for (size_t i = 0; i < n; ++i) mixed = (mixed ^ static_cast<uint32_t>(at(i))) * 0x9E3779B97F4A7C15ull;
  return static_cast<uint32_t>(mixed >> 32);
}

}  // namespace

SuffixIndex::SuffixIndex(int64_t n, int64_t most)
    : n_(static_cast<size_t>(n)), most_(static_cast<size_t>(most)), latest_(64, 0) {
  check(n > 0, "an n-gram has at least one token");
  check(most > n && (most & (most - 1)) == 0,
        "an index keeps a power of two of tokens, more than an n-gram has");
}

SuffixIndex::Span SuffixIndex::learn(const TokenList& list, size_t begin) {
  const size_t first = std::max(begin, list.size() - std::min(list.size(), most_ - 1));
  const uint64_t start = total_;
  for (size_t i = first; i < list.size(); ++i) append(list[i]);
  if (total_ > start) append(kNothing);
  return {start, total_};
}

void SuffixIndex::forget(Span span) {
  const uint64_t end = std::min(span.end, total_);
  for (uint64_t i = std::max(span.begin, oldest()); i < end; ++i) at(i) = kNothing;
}

std::vector<int32_t> SuffixIndex::follow(const TokenList& list, size_t most) const {
  const Place best = find(list);
  std::vector<int32_t> found;
  if (best.run == 0) return found;
  for (uint64_t i = best.end; i < total_ && found.size() < most && at(i) != kNothing; ++i)
    found.push_back(at(i));
  return found;
}

void SuffixIndex::append(int32_t token) {
  if (text_.size() < most_) {
    text_.push_back(token);
    earlier_.push_back(0);
  } else {
    at(total_) = token;
    earlier_[total_ & (most_ - 1)] = 0;
  }
  ++total_;
  if (text_.size() > latest_.size())
    rebuild();
  else if (total_ >= n_)
    enter(total_);
}

// A run with a mark in it is found by nobody: no list has one.
void SuffixIndex::enter(uint64_t end) {
  uint64_t& latest = latest_[bucket(hash_of(n_, [&](size_t i) { return at(end - n_ + i); }))];
  const uint64_t distance = end - latest;
  earlier_[(end - 1) & (most_ - 1)] = latest == 0 || distance >= most_ ? 0 : static_cast<uint32_t>(distance);
  latest = end;
}

// REQUIRES: the ring is not full before, so that what is in it begins at position 0
void SuffixIndex::rebuild() {
  latest_.assign(std::min(most_, 4 * latest_.size()), 0);
  for (uint64_t end = n_; end <= total_; ++end) enter(end);
}

SuffixIndex::Place SuffixIndex::find(const TokenList& list) const {
  Place best;
  if (list.size() < n_) return best;
  const int32_t* last = list.data() + list.size() - n_;
  uint64_t end = latest_[bucket(hash_of(n_, [&](size_t i) { return last[i]; }))];
  for (int i = 0; end >= oldest() + n_ && i < kMostPlaces; ++i) {
    const size_t length = run_length(list, end);
    if (length >= n_ && length > best.run && end < total_ && at(end) != kNothing) best = {end, length};
    const uint32_t distance = earlier_[(end - 1) & (most_ - 1)];
    if (distance == 0) break;
    end -= distance;
  }
  return best;
}

// Tokens before `end` that are those at the end of the list.
size_t SuffixIndex::run_length(const TokenList& list, uint64_t end) const {
  const size_t most = std::min({list.size(), static_cast<size_t>(end - oldest()), kLongestRun});
  size_t length = 0;
  while (length < most && at(end - 1 - length) == list[list.size() - 1 - length]) ++length;
  return length;
}

}  // namespace bequest
