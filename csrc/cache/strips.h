// The strips of a cache: what one block can hold of a sequence's tokens, and how much of it stays needed.
//
// Blocks are of equal size and hold a few layers. Layers that keep all tokens are one group, those of a
// window another one each; a group of many layers has several strips. The tokens of one block then take one
// block per strip. A strip of a window gives back what its layers cannot see any more.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/check.h"

namespace bequest {

// What a sequence keeps of its windows while it goes on.
struct Keeping {
  enum class What {
    kWindow,  // what its next token sees
    kLease,   // and what a child needs that starts where the prompt ends, or at a multiple of the interval
    kAll,     // everything
  };
  What what = What::kWindow;
  int64_t num_prompt = 0;  // of a lease
};

class Strips {
 public:
  // A child may start this many tokens before the end of its parent, whose last steps were discarded, or
  // whose last tokens nobody was shown.
  static constexpr int64_t kSlack = 16;

  // `windows`: of each strip, how many tokens back a query sees, itself included; 0: all. `interval`: of the
  // positions that leases keep windows of. `most_chunk`: tokens of one sequence that a step computes at most;
  // 0: any number.
  Strips(std::vector<int64_t> windows, int64_t block_size, int64_t interval, int64_t most_chunk)
      : windows_(std::move(windows)), block_size_(block_size), interval_(interval), most_chunk_(most_chunk) {
    check(!windows_.empty(), "a cache has at least one strip");
    check(interval >= 1, "an interval has at least one token");
    for (const int64_t window : windows_) {
      check(window >= 0, "a window is not negative");
      slides_ |= window > 0;
      keeps_some_whole_ |= window == 0;
    }
  }

  int32_t count() const { return static_cast<int32_t>(windows_.size()); }
  const std::vector<int64_t>& windows() const { return windows_; }
  bool is_whole(int32_t strip) const { return windows_[strip] == 0; }
  // Whether some strip gives blocks back, and whether some strip never does.
  bool slides() const { return slides_; }
  bool keeps_some_whole() const { return keeps_some_whole_; }

  // Blocks [first_seen, ...) are what a token at `position` sees in a strip beside itself.
  int64_t first_seen(int32_t strip, int64_t position) const {
    return is_whole(strip) ? 0 : std::max<int64_t>(0, position - windows_[strip] + 1) / block_size_;
  }
  // Whether a token at `position` that begins a block sees nothing but itself.
  bool sees_itself_alone(int32_t strip) const { return windows_[strip] == 1; }
  // Blocks [first_kept, ...) stay with a sequence that goes on at `position`, whatever it keeps beside them.
  int64_t first_kept(int32_t strip, int64_t position) const {
    return is_whole(strip) ? 0 : std::max<int64_t>(0, position - reach(strip)) / block_size_;
  }
  // Whether block `i`, which slid out, is kept for somebody who comes later.
  bool is_marked(int32_t strip, int64_t i, const Keeping& keeping) const {
    if (keeping.what == Keeping::What::kAll) return true;
    if (keeping.what == Keeping::What::kWindow) return false;
    const int64_t begin = i * block_size_, end = begin + block_size_;
    const int64_t mark = (begin / interval_ + 1) * interval_;
    return mark - reach(strip) < end || is_before(keeping.num_prompt, strip, begin, end);
  }

  // The most blocks that a strip grows by at a time, over and above what it has.
  int64_t most_growth(int32_t strip, int64_t blocks, const Keeping& keeping) const {
    if (is_whole(strip) || most_chunk_ == 0 || keeping.what != Keeping::What::kWindow) return blocks;
    return std::min(blocks, (reach(strip) + most_chunk_) / block_size_ + 2);
  }
  // The most blocks of a strip that a lease of `num_tokens` tokens holds.
  int64_t most_leased(int32_t strip, int64_t num_tokens, int64_t num_prompt) const {
    const int64_t blocks = (num_tokens + block_size_ - 1) / block_size_;
    if (is_whole(strip)) return blocks;
    const Keeping keeping{Keeping::What::kLease, num_prompt};
    int64_t held = reach(strip) / block_size_ + 2;
    for (int64_t i = 0; i < blocks && held < blocks; ++i) held += is_marked(strip, i, keeping);
    return std::min(held, blocks);
  }

 private:
  int64_t reach(int32_t strip) const { return windows_[strip] - 1 + kSlack; }
  bool is_before(int64_t mark, int32_t strip, int64_t begin, int64_t end) const {
    return begin < mark && mark - reach(strip) < end;
  }

  std::vector<int64_t> windows_;
  int64_t block_size_;
  int64_t interval_;
  int64_t most_chunk_;
  bool slides_ = false;
  bool keeps_some_whole_ = false;
};

}  // namespace bequest
