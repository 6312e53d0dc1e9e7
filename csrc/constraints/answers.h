// Answers that are held to grammars: what steps sample for them, and the masks of the next step.
//
// A step has many of them, so loops over them are here: to move and to ask each from Python would hand the
// interpreter over at every row, and llguidance's own pool hands the rows to another thread. The rows of a
// step follow each other in the thread that calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "constraints/matchers.h"

namespace bequest {

// One answer. Who makes masks moves it; all else is touched with the interpreter held.
struct Answer {
  Matcher matcher;
  const std::vector<uint32_t> ends;              // tokens that may end it, llguidance's first
  int64_t num_sampled = 0;                       // steps launched that sample for it
  int64_t num_seen = 0;                          // of those steps
  bool ended = false;                            // nobody looks at what is sampled from now on
  std::optional<std::string> failed = {};        // why it cannot go on
  std::optional<std::string> failed_ahead = {};  // the same behind the last drafts, if they are right
  std::vector<uint32_t> coming = {};             // tokens that the matcher has yet to take

  bool done() const { return ended || failed; }
  // What a step has sampled. Behind an end, or where nothing could be sampled, it has ended.
  void see(std::span<const std::optional<uint32_t>> tokens);
  // mask [words], behind all tokens that were seen: of one that has ended anything may come, of one that has
  // failed nothing. False: the matcher has an error, and nothing may come.
  bool fill(uint32_t* mask);
  // llguidance knows of one end token: where that may come, the others may.
  void allow_every_end(uint32_t* mask) const;
};

// An answer and the row of its mask.
struct MaskRow {
  Answer* answer;
  size_t row;
};

// An answer whose drafted tokens are at `row` + 1 and behind.
struct DraftedRow {
  const Answer* answer;
  size_t row;
  std::vector<uint32_t> drafts;
};

// Where masks are made: [rows, words].
struct MaskPlace {
  uint32_t* masks;
  size_t num_words;

  uint32_t* at(size_t row) const { return masks + row * num_words; }
};

// Fills the masks of rows, in up to `num_threads` threads. The rows whose matchers have errors: nothing may
// come there. REQUIRES: no answer is in two rows
std::vector<size_t> fill_masks(std::span<const MaskRow> rows, MaskPlace place, int num_threads);

// Fills the masks behind drafts that the grammars take; the others stay as they are. A copy walks: one that
// runs into a limit stays there, and the draft may be wrong. From there on nothing may come; the rows of such
// answers, and why. REQUIRES: the masks before the drafts are filled
std::vector<std::pair<size_t, std::string>> fill_ahead(std::span<const DraftedRow> rows, MaskPlace place,
                                                       int num_threads);

}  // namespace bequest
