// Where a run of tokens came before, and what followed it there: a guess of what comes next.
//
// The n-grams of a text that grows are kept by their hash; the places of one hash are chained, the latest
// first. Tokens are compared, so what is found followed the very same tokens. Owned by the event-loop thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cache/token_list.h"

namespace bequest {

class NgramIndex {
 public:
  // n: the shortest run that counts. REQUIRES: n > 0
  explicit NgramIndex(int64_t n);

  // Takes in what `list` has beyond what is known. REQUIRES: it begins with what is known
  void learn(const TokenList& list);

  // Tokens that `list` ends with and that came before with something behind them; 0: fewer than n.
  size_t run(const TokenList& list) const { return find(list).run; }

  // What followed the longest run that `list` ends with, up to `most` tokens; of equal ones the latest. Empty
  // if its last n tokens were not seen before, with something behind them. A text that repeats itself is
  // taken to go on so.
  std::vector<int32_t> follow(const TokenList& list, size_t most) const;

  size_t size() const { return text_.size(); }

 private:
  static constexpr int kMostPlaces = 32;     // that are looked at
  static constexpr size_t kLongestRun = 64;  // that is measured

  struct Place {
    size_t end = 0;  // behind a run
    size_t run = 0;
  };

  Place find(const TokenList& list) const;
  uint32_t hash(const int32_t* tokens) const;
  void enter(size_t end);
  void rebuild();
  size_t run_length(const TokenList& list, size_t end) const;

  const size_t n_;
  std::vector<int32_t> text_;
  std::vector<int32_t> latest_;   // by hash: behind its latest n-gram, or 0; a power of two of them
  std::vector<int32_t> earlier_;  // [text] by the end of an n-gram less one: the end of the one before, or 0
};

}  // namespace bequest
