// How many queries of one sequence are decode tiles (work_list.h): one, or some drafts that are checked.
//
// Such tiles read their keys once for each of them, but are cut finely enough for all workers to have a part.
// A prefill tile of few rows would leave most of the chip idle, and its kernel would be one more in each
// layer. Where there are so many keys that reading them again takes longer, the work list has prefill tiles
// for more queries than one decode tile has. But a step of no more tokens than these has none: its graph has
// no kernel for them.
#pragma once

#include <algorithm>

namespace bequest {

inline constexpr int kFewTokens = 8, kFewTiles = 4;

// decode_tokens: of a tile, at most
constexpr int few_tokens(int decode_tokens) {
  return std::max(decode_tokens, std::min(kFewTokens, kFewTiles * decode_tokens));
}

}  // namespace bequest
