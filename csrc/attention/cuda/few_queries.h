// How many queries of one sequence are decode tiles (work_list.h): one, or some drafts that are checked.
//
// Such tiles read their keys once for each of them, but are cut finely enough for all workers to have a part.
// A prefill tile of few rows would leave most of the chip idle, and its kernel would be one more in each
// layer.
#pragma once

#include <algorithm>

namespace bequest {

inline constexpr int kFewTokens = 8, kFewTiles = 4;

// decode_tokens: of a tile, at most
constexpr int few_tokens(int decode_tokens) {
  return std::max(decode_tokens, std::min(kFewTokens, kFewTiles * decode_tokens));
}

}  // namespace bequest
