#include "constraints/answers.h"

#include <algorithm>
#include <atomic>

#include "core/helpers.h"

namespace bequest {

namespace {

// f(i) for each i in [0, count), by the caller and by who helps in time. f must not throw.
template <class F>
void for_each(size_t count, int num_threads, F&& f) {
  std::atomic<size_t> next = 0;
  const auto work = [&](int) {
    for (size_t i = next++; i < count; i = next++) f(i);
  };
  if (num_threads == 1) {
    work(0);
  } else {
    run_parts(num_threads, work);
  }
}

}  // namespace

void Answer::see(std::span<const std::optional<uint32_t>> tokens) {
  ++num_seen;
  for (const std::optional<uint32_t> token : tokens) {
    if (ended) return;
    ended = !token || std::find(ends.begin(), ends.end(), *token) != ends.end();
    if (!ended && !failed) coming.push_back(*token);
  }
}

bool Answer::fill(uint32_t* mask) {
  const size_t num_words = matcher.tokens().num_words();
  if (done()) {
    std::fill_n(mask, num_words, failed ? 0 : ~uint32_t{0});
    return true;
  }
  if (!coming.empty()) matcher.consume(coming);  // one that cannot has an error
  coming.clear();
  if (!matcher.fill(mask)) {
    std::fill_n(mask, num_words, 0);
    return false;
  }
  allow_every_end(mask);
  return true;
}

void Answer::allow_every_end(uint32_t* mask) const {
  const uint32_t may_end = mask[ends[0] / 32] >> (ends[0] % 32) & 1;
  for (const uint32_t token : ends) mask[token / 32] |= may_end << (token % 32);
}

std::vector<size_t> fill_masks(std::span<const MaskRow> rows, MaskPlace place, int num_threads) {
  std::vector<char> filled(rows.size());
  for_each(rows.size(), num_threads,
           [&](size_t i) { filled[i] = rows[i].answer->fill(place.at(rows[i].row)); });
  std::vector<size_t> failed;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (!filled[i]) failed.push_back(rows[i].row);
  }
  return failed;
}

namespace {

// Why it cannot go on, or nothing.
std::string walk(const DraftedRow& drafted, MaskPlace place) {
  Matcher copy = drafted.answer->matcher.copy();
  for (size_t i = 0; i < drafted.drafts.size() && !copy.is_stopped(); ++i) {
    const std::span<const uint32_t> token(&drafted.drafts[i], 1);
    const bool takes = copy.count_valid(token) == 1;
    if (!takes && !copy.is_error()) break;
    const size_t row = drafted.row + 1 + i;
    if (!takes || !copy.consume(token) || !copy.fill(place.at(row))) {
      std::fill(place.at(row), place.at(drafted.row + 1 + drafted.drafts.size()), 0);
      return copy.error();
    }
    drafted.answer->allow_every_end(place.at(row));
  }
  return "";
}

}  // namespace

std::vector<std::pair<size_t, std::string>> fill_ahead(std::span<const DraftedRow> rows, MaskPlace place,
                                                       int num_threads) {
  std::vector<std::string> errors(rows.size());
  for_each(rows.size(), num_threads, [&](size_t i) { errors[i] = walk(rows[i], place); });
  std::vector<std::pair<size_t, std::string>> failed;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (!errors[i].empty()) failed.emplace_back(rows[i].row, std::move(errors[i]));
  }
  return failed;
}

}  // namespace bequest
