#include "cache/beam_tables.h"

#include <algorithm>

#include "core/check.h"

namespace bequest {

BeamTables::BeamTables(BlockTable& first) : front_(first.fork()) {
  first.free();
  if (front_.pool().strips().slides()) {
    tails_.push_back(front_.fork());
    front_.free();
  } else {
    tails_.push_back(front_.split_tail());
  }
}

BlockTable BeamTables::fork(int32_t beam) const {
  const BlockTable& tail = tails_.at(beam);
  if (front_.num_rows() == 0) return tail.fork();
  BlockTable whole = front_.fork();
  whole.append(tail);
  return whole;
}

void BeamTables::reorder(std::span<const int32_t> parents, std::span<const int32_t> tokens) {
  check(parents.size() == tokens.size(), "a beam has one parent and one token");
  std::vector<int32_t> heirs(tails_.size());
  for (size_t i = 0; i < parents.size(); ++i) {
    check(0 <= parents[i] && parents[i] < size(), "a beam's parent is not among the beams");
    check(tokens[i] >= 0, "a token id is not negative");
    ++heirs[parents[i]];
  }
  std::vector<BlockTable> after;
  after.reserve(parents.size());
  for (const int32_t parent : parents) {
    if (--heirs[parent] == 0) {
      after.push_back(std::move(tails_[parent]));
    } else {
      after.push_back(tails_[parent].fork());
    }
  }
  tails_.swap(after);
  tokens_.assign(tokens.begin(), tokens.end());
}

int64_t BeamTables::blocks_needed(int64_t position) const {
  const int64_t begin = position - front_.capacity();
  int64_t needed = 0;
  for (const BlockTable& tail : tails_) needed += tail.blocks_needed(begin, begin + 1);
  return needed;
}

std::optional<std::vector<BlockCopy>> BeamTables::try_prepare_write(int64_t position) {
  if (blocks_needed(position) > front_.pool().num_free()) return std::nullopt;
  const int64_t begin = position - front_.capacity();
  std::vector<BlockCopy> copies;
  for (BlockTable& tail : tails_) {
    tail.slide(begin);
    tail.prepare_write(begin, begin + 1, copies);
  }
  return copies;
}

// Whether the beams have all blocks in common, but for the one that position `begin` of their tails lies in.
bool BeamTables::differs_only_at(int64_t begin) const {
  if (size() == 1) return true;
  const int64_t bs = front_.pool().block_size();
  const int64_t shared = begin / bs * front_.num_strips();
  const auto& first = tails_[0].entries();
  return begin % bs != 0 && std::all_of(tails_.begin(), tails_.end(), [&](const BlockTable& tail) {
           return std::equal(first.begin(), first.begin() + shared, tail.entries().begin());
         });
}

std::optional<BeamTables> BeamTables::try_ahead(int32_t width, int64_t position,
                                                std::vector<BlockCopy>& copies) const {
  check(width >= size() && size() > 0, "beams that go on are no more than may run");
  const int64_t begin = position - front_.capacity();
  if (front_.pool().strips().slides() || !differs_only_at(begin)) return std::nullopt;
  std::vector<BlockTable> tails;
  tails.reserve(width);
  for (int32_t beam = 0; beam < width; ++beam) tails.push_back(tails_[beam % size()].fork());
  BeamTables ahead(front_.fork(), std::move(tails));
  auto prepared = ahead.try_prepare_write(position);
  if (!prepared) return std::nullopt;
  copies = std::move(*prepared);
  return ahead;
}

void BeamTables::succeed(BeamTables& before, std::span<const int32_t> tokens) {
  check(tokens.size() <= tails_.size() && ended_.empty(), "more beams go on than a step has computed");
  for (const int32_t token : tokens) check(token >= 0, "a token id is not negative");
  while (tails_.size() > tokens.size()) tails_.pop_back();
  tokens_.assign(tokens.begin(), tokens.end());
  ended_.swap(before.ended_);
  before.free();
}

int32_t BeamTables::end(std::span<const int32_t> rows) {
  const auto first = static_cast<int32_t>(ended_.size());
  for (const int32_t row : rows) check(0 <= row && row < size(), "a beam that ends is not among the beams");
  for (const int32_t row : rows) ended_.emplace_back(fork(row));
  return first;
}

BlockTable BeamTables::take_ended(int32_t place) {
  std::optional<BlockTable>& table = ended_.at(place);
  check(table.has_value(), "an ended beam is taken once");
  BlockTable taken = std::move(*table);
  table.reset();
  return taken;
}

const BlockTable& BeamTables::ended_at(int32_t place) const {
  check(ended_.at(place).has_value(), "the blocks of an ended beam were taken");
  return *ended_[place];
}

// The entries of a beam that count, in two parts: those of the front, which are all on the device, and those
// behind.
struct BeamTables::Entries {
  const BlockTable* front;
  const BlockTable* tail;
  size_t count;

  Entries(const BlockTable& front, const BlockTable& tail, int64_t num_tokens) : front(&front), tail(&tail) {
    const int64_t bs = tail.pool().block_size();
    const auto wanted = static_cast<size_t>((num_tokens + bs - 1) / bs * tail.num_strips());
    const size_t before = std::min(wanted, num_front());
    count = before + tail.num_known(wanted - before);
  }

  size_t num_front() const { return front->entries().size(); }
  int32_t operator[](size_t i) const {
    return i < num_front() ? front->entries()[i] : tail->entries()[i - num_front()];
  }
  // Of the first `most`, those that both begin with.
  size_t num_shared(const Entries& other, size_t most) const {
    size_t shared = front == other.front ? std::min(most, num_front()) : 0;
    while (shared < most && (*this)[shared] == other[shared]) ++shared;
    return shared;
  }
  void tell(size_t begin, size_t end, BlockEpochs& told) const {
    for (size_t i = begin; i < end; ++i) {
      const int32_t entry = (*this)[i];
      const bool here = entry > 0;
      told.push_back({here ? entry : kNullBlock, here ? tail->pool().epoch(entry) : 0});
    }
  }
};

BeamEpochs BeamTables::epochs(std::span<const int32_t> places, std::span<const int32_t> rows,
                              std::span<const int32_t> num_tokens) const {
  check(places.size() == num_tokens.size() && rows.size() == num_tokens.size(),
        "a beam has one place, one row and one length");
  BeamEpochs epochs;
  if (places.empty()) return epochs;
  const BlockTable nothing = front_.slice_to(0);
  std::vector<Entries> beams;
  beams.reserve(places.size());
  for (size_t i = 0; i < places.size(); ++i) {
    if (places[i] == kNoPlace) {
      beams.emplace_back(front_, tails_.at(rows[i]), num_tokens[i]);
    } else {
      beams.emplace_back(nothing, ended_at(places[i]), num_tokens[i]);
    }
  }
  size_t shared = beams[0].count;
  for (const Entries& beam : beams) shared = beam.num_shared(beams[0], std::min(shared, beam.count));
  beams[0].tell(0, shared, epochs.front);
  epochs.ends.reserve(beams.size());
  for (const Entries& beam : beams) {
    beam.tell(shared, beam.count, epochs.tails);
    epochs.ends.push_back(epochs.tails.size());
  }
  return epochs;
}

void BeamTables::free() {
  tails_.clear();
  ended_.clear();
  tokens_.clear();
  front_.free();
}

}  // namespace bequest
