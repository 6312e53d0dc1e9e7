// The token ids of a sequence: grows at the end, may be cut there. Owned by the event-loop thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/check.h"

namespace bequest {

class TokenList {
 public:
  TokenList() = default;
  // A copy with `more` behind it.
  TokenList(const TokenList& other, std::span<const int64_t> more) {
    tokens_.reserve(other.size() + more.size());
    tokens_ = other.tokens_;
    for (const int64_t token : more) append(token);
  }

  // Negative ids are kept free: in a plan they stand for tokens that only the device knows.
  void append(int64_t token) {
    check(0 <= token && token <= INT32_MAX, "a token id must be in [0, 2^31)");
    tokens_.push_back(static_cast<int32_t>(token));
  }

  // Makes room for more tokens, at least doubling it, so that many small extensions stay linear.
  void reserve_more(size_t num_tokens) {
    const size_t size = tokens_.size() + num_tokens;
    if (size > tokens_.capacity()) tokens_.reserve(std::max(size, 2 * tokens_.capacity()));
  }

  // REQUIRES: num_tokens <= size()
  void truncate(size_t num_tokens) {
    check(num_tokens <= tokens_.size(), "a token list cannot be truncated to more than it holds");
    tokens_.resize(num_tokens);
  }

  // Tokens at the beginning that both lists have in common.
  size_t common_prefix(const TokenList& other) const {
    const size_t longest = std::min(size(), other.size());
    const auto end = tokens_.begin() + static_cast<std::ptrdiff_t>(longest);
    return std::mismatch(tokens_.begin(), end, other.tokens_.begin()).first - tokens_.begin();
  }

  size_t size() const { return tokens_.size(); }
  const int32_t* data() const { return tokens_.data(); }
  int32_t operator[](size_t i) const { return tokens_[i]; }

  bool operator==(const TokenList&) const = default;

 private:
  std::vector<int32_t> tokens_;
};

}  // namespace bequest
