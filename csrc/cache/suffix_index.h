// What followed the end of a text in other texts: a guess of what comes next.
//
// The latest tokens of many texts lie in a ring, so memory is bounded whatever is learnt. The n-grams in it
// are kept by their hash; the places of one hash are chained, the latest first, by the distance to the one
// before. A chain ends where the ring has been overwritten. Tokens are compared, so what is found followed
// the very same tokens, and a text that was forgotten is found no more. Owned by the event-loop thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cache/token_list.h"

namespace bequest {

class SuffixIndex {
 public:
  // n: the shortest run that counts; most: tokens that are kept. REQUIRES: n > 0, `most` a power of two above
  // n
  SuffixIndex(int64_t n, int64_t most);

  // Takes in a text from token `begin` on; of a longer one than fits, its end. Returns where it begins and
  // ends.
  struct Span {
    uint64_t begin, end;
  };
  Span learn(const TokenList& list, size_t begin);

  // Nothing of what was learnt there is found any more, or kept.
  void forget(Span span);

  // Tokens that `list` ends with and that came before with something behind them; 0: fewer than n.
  size_t run(const TokenList& list) const { return find(list).run; }

  // What followed the longest of those runs, up to `most` tokens and to the end of the text it was in; of
  // equal ones the latest.
  std::vector<int32_t> follow(const TokenList& list, size_t most) const;

  size_t size() const { return text_.size(); }  // tokens, and a mark behind each text

 private:
  static constexpr int kMostPlaces = 32;     // that are looked at
  static constexpr size_t kLongestRun = 64;  // that is measured
  static constexpr int32_t kNothing = -1;    // the end of a text, or what was forgotten

  struct Place {
    uint64_t end = 0;  // behind a run
    size_t run = 0;
  };

  uint64_t oldest() const { return total_ - text_.size(); }
  int32_t& at(uint64_t position) { return text_[position & (most_ - 1)]; }
  int32_t at(uint64_t position) const { return text_[position & (most_ - 1)]; }
  void append(int32_t token);
  void enter(uint64_t end);
  void rebuild();
  Place find(const TokenList& list) const;
  size_t bucket(uint32_t hash) const { return hash & (latest_.size() - 1); }
  size_t run_length(const TokenList& list, uint64_t end) const;

  const size_t n_, most_;
  uint64_t total_ = 0;         // tokens ever learnt: a position counts them
  std::vector<int32_t> text_;  // [most], by position modulo `most`; shorter until it is full
  std::vector<uint32_t>
      earlier_;  // likewise, by the end of an n-gram less one: the distance to the one before, or 0
  std::vector<uint64_t> latest_;  // by hash: behind its latest n-gram, or 0; a power of two of them
};

}  // namespace bequest
