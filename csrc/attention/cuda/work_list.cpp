#include "attention/cuda/work_list.h"

#include <algorithm>
#include <vector>

#include "attention/cuda/few_queries.h"
#include "attention/cuda/old_keys.h"
#include "attention/cuda/work_tiles.h"
#include "core/check.h"

namespace bequest {
namespace {

constexpr int kItemInts = sizeof(WorkItem) / sizeof(int32_t);
constexpr int kMergeInts = sizeof(MergeEntry) / sizeof(int32_t);
constexpr int kHeaderInts = sizeof(WorkListHeader) / sizeof(int32_t);
static_assert(kItemInts == 8 && kMergeInts == 8 && kHeaderInts % 4 == 0 &&
                  sizeof(JoinEntry) == sizeof(MergeEntry),
              "the kernels read these as 16-byte vectors");

// Costs in quarters of a unit.
constexpr int64_t kUnitCost = 4;
constexpr int64_t kItemCost = 5;  // of starting and finishing a decode item, whatever its length
constexpr int64_t kSnap = 32;     // a decode cut closer to a tile's edge than share / kSnap moves there
constexpr int64_t kMinPrefillUnits = 4;  // a state costs more to store and merge than shorter pieces gain
constexpr int kPrefillPiecesPerShare = 2;
constexpr int64_t kPrefillGrains = 8;  // of a worker's share: what items are sorted by
constexpr int64_t kNarrowUnits = 2;    // of a tail that one warp attends to, at most
// A tail that waits for shared states reads them by itself: for more of them than this for each worker it is
// done sooner by a kernel of its own.
constexpr int64_t kJoinsPerWorker = 2;
// Of a short tail that a warp attends to beside three others: a part of what a thread block takes for one.
constexpr int64_t kTailCost = 3;

// Writes the entries of tails that join shared states to their own. They fill the section of merges from its
// end.
class JoinWriter {
 public:
  JoinWriter(int32_t* section, const WorkListLayout& layout)
      : entries_(reinterpret_cast<JoinEntry*>(section)),
        next_(layout.max_decode_merges + layout.max_prefill_merges),
        num_readers_(layout.wide_workers) {}

  // Returns the entry's index.
  int32_t add(const Tile& tile, int32_t tail_row) {
    const Share& share = *tile.share;
    entries_[--next_] = {
        share.state_row, share.num_states, share.stride, share.wide_tile, 0, tail_row, tile.first_token, 0};
    if (share.wide_tile.exists()) ++num_readers_[share.wide_tile.get()];
    added_.push_back(next_);
    return next_;
  }

  // When all are added: tells tails how many of them wait for the same tile, and tiles that nobody waits.
  void finish(WorkItem* items, int32_t num_items) const {
    for (const int32_t index : added_) {
      const MaybeIndex counter = entries_[index].counter;
      if (counter.exists()) entries_[index].num_readers = num_readers_[counter.get()];
    }
    for (int32_t i = 0; i < num_items; ++i) {
      int32_t& position = items[i].first_position;
      if (is_counted(position) && num_readers_[counter_of_position(position)] == 0)
        position = items[i].kv_end;
    }
  }

 private:
  JoinEntry* const entries_;
  int32_t next_;
  std::vector<int32_t> num_readers_;  // of each wide tile
  std::vector<int32_t> added_;
};

// Writes the pieces of tiles, and the merges of those that are cut.
class PieceWriter {
 public:
  PieceWriter(WorkItem* items, MergeEntry* merges, WorkListHeader* header, int group)
      : items_(items), merges_(merges), header_(header), group_(group) {}

  // From now on whole tails join the states of wide and prefill tiles to their own.
  void set_joins(JoinWriter* joins) { joins_ = joins; }

  // From now on the states of tiles, which are wide ones, go to the mailbox.
  void set_mailed() { is_mailed_ = true; }

  // Item `index`: the units [begin, end) of a tile. Pieces come in order, the last ends at tile.units().
  void write(int32_t index, const Tile& tile, int64_t begin, int64_t end) {
    const int32_t rows = tile.num_tokens * group_;
    const int64_t units = tile.units();
    const bool uncut = begin == 0 && end == units;
    const bool joins = uncut && joins_ != nullptr && tile.share != nullptr && tile.share->joins;
    const bool whole = joins || (uncut && !tile.leaves_state());
    if (begin == 0) num_pieces_ = 0;
    const ResultPlace result = joins   ? ResultPlace::joined(joins_->add(tile, num_mail_rows_))
                               : whole ? ResultPlace::output()
                                       : ResultPlace::state(num_state_rows() + num_pieces_++ * rows);
    const int32_t origin = tile.first_unit_key();
    const bool counts = joins_ != nullptr && !is_mailed_ && tile.number.exists();
    items_[index] = {tile.sequence,
                     tile.first_token,
                     tile.num_tokens,
                     counts ? counted_position(tile.number.get()) : tile.first_position,
                     std::max(tile.kv_begin, static_cast<int32_t>(origin + begin * kUnitKeys)),
                     std::min(tile.kv_end, static_cast<int32_t>(origin + end * kUnitKeys)),
                     result,
                     MaybeIndex::none()};
    if (joins && is_mailed_) num_mail_rows_ += rows;
    if (whole || end < units) return;
    if (tile.sharers != nullptr) {
      share_out(tile);
    } else {
      const Share share = tile.share != nullptr ? *tile.share : Share{};
      merges_[header_->num_merges++] = {tile.first_token,
                                        tile.num_tokens,
                                        header_->num_state_rows,
                                        num_pieces_,
                                        share.state_row,
                                        share.num_states,
                                        share.stride,
                                        0};
    }
    num_state_rows() += num_pieces_ * rows;
  }

  void write_empty(int32_t index) {
    items_[index] = {0, 0, 0, 0, 0, 0, ResultPlace::output(), MaybeIndex::none()};
  }
  void link(int32_t index, int32_t next) { items_[index].next = MaybeIndex::of(next); }

 private:
  // Rows of states so far, where the current ones go.
  int32_t& num_state_rows() { return is_mailed_ ? num_mail_rows_ : header_->num_state_rows; }

  // Tells the sequences of a shared tile where their rows of its states are.
  void share_out(const Tile& tile) {
    for (int32_t i = 0; i < tile.num_tokens; ++i) {
      tile.sharers[i].state_row = num_state_rows() + i * group_;
      tile.sharers[i].num_states = num_pieces_;
      tile.sharers[i].stride = tile.num_tokens * group_;
      tile.sharers[i].wide_tile = is_mailed_ ? MaybeIndex::none() : tile.number;
      tile.sharers[i].joins = tile.section != Section::kDecode;
    }
  }

  WorkItem* const items_;
  MergeEntry* const merges_;
  WorkListHeader* const header_;
  const int32_t group_;
  JoinWriter* joins_ = nullptr;
  bool is_mailed_ = false;
  int32_t num_mail_rows_ = 0;
  int32_t num_pieces_ = 0;  // of the current tile
};

// Deals the units of wide tiles out to the first workers, in turns.
class WideDealer {
 public:
  WideDealer(int64_t num_units, const WorkListLayout& layout, PieceWriter& writer)
      : num_workers_(static_cast<int32_t>(std::min<int64_t>(num_units, layout.wide_workers))),
        writer_(writer),
        num_items_(layout.workers) {}

  void add(const Tile& tile) {
    for (int64_t unit = 0; unit < tile.units(); ++unit) {
      // A worker's first item is at its number, which is also its place among those dealt so far.
      const int32_t index = num_dealt_ < num_workers_ ? num_dealt_ : num_items_++;
      writer_.write(index, tile, unit, unit + 1);
      if (num_dealt_ >= num_workers_) writer_.link(num_dealt_ - num_workers_, index);
      ++num_dealt_;
    }
  }

  int32_t num_workers() const { return num_workers_; }
  int32_t num_items() const { return num_items_; }  // with one for every worker

 private:
  const int32_t num_workers_;
  PieceWriter& writer_;
  int32_t num_dealt_ = 0;
  int32_t num_items_;
};
static_assert(kWideUnits == 2, "a worker's second item is linked to the one at its number");

// Deals the line of decode tiles out to the workers from `first` on. `num_items` are taken, with one for
// every worker.
class DecodeDealer {
 public:
  DecodeDealer(int64_t num_tiles, int64_t num_units, int32_t first, int32_t workers, int32_t num_items,
               PieceWriter& writer)
      : total_(num_tiles * kItemCost + num_units * kUnitCost),
        parts_(std::clamp<int64_t>(num_units, 1, workers - first)),
        first_(first),
        workers_(workers - first),
        writer_(writer),
        num_items_(num_items) {}

  void add(const Tile& tile) {
    const int64_t units = tile.units();
    for (int64_t begin = 0; begin < units;) {
      const int64_t end = piece_end(units, begin);
      if (end > begin) writer_.write(next_index(), tile, begin, end);
      if (end < units) ++worker_;
      begin = end;
    }
    line_ += kItemCost + units * kUnitCost;
    while (worker_ + 1 < parts_ && cut() <= line_) ++worker_;
  }

  // Marks the workers that got nothing; returns the length of the section, 0 if all got nothing.
  int32_t finish() {
    for (int32_t w = last_worker_ + 1; w < workers_; ++w) writer_.write_empty(first_ + w);
    return last_worker_ < 0 && first_ == 0 ? 0 : num_items_;
  }

 private:
  // The place on the line where the current worker's part ends.
  int64_t cut() const { return (worker_ + 1) * total_ / parts_; }

  // The unit at which the current worker's piece of a tile, begun at unit `begin`, ends.
  int64_t piece_end(int64_t units, int64_t begin) const {
    if (worker_ + 1 >= parts_ || cut() >= line_ + kItemCost + units * kUnitCost) return units;
    const int64_t offset = std::max<int64_t>(0, cut() - line_ - kItemCost);
    const int64_t end = std::clamp((offset + kUnitCost / 2) / kUnitCost, begin, units);
    const int64_t slack = total_ / parts_ / kSnap;
    if ((units - end) * kUnitCost <= slack) return units;
    if (begin == 0 && end * kUnitCost <= slack) return 0;
    return end;
  }

  // Where the current worker's next item goes: its own place for the first, then linked to the last.
  int32_t next_index() {
    const int32_t index = worker_ == last_worker_ ? num_items_++ : first_ + worker_;
    if (worker_ == last_worker_) writer_.link(last_index_, index);
    while (++last_worker_ < worker_) writer_.write_empty(first_ + last_worker_);
    last_worker_ = worker_;
    last_index_ = index;
    return index;
  }

  const int64_t total_;  // cost of all tiles: the length of the line
  const int64_t parts_;  // workers that get a share
  const int32_t first_;  // workers before this one are not counted below
  const int32_t workers_;
  PieceWriter& writer_;
  int64_t line_ = 0;  // cost of the tiles so far
  int32_t worker_ = 0;
  int32_t last_worker_ = -1;  // the last that got an item
  int32_t last_index_ = -1;   // that item
  int32_t num_items_;
};

// The tails, one after another. Returns the length of the section.
int32_t write_narrow(Step& step, const WideDealer& wide, WorkListHeader& header, PieceWriter& writer) {
  int32_t count = wide.num_items();
  header.first_narrow_item = count;
  for (int32_t w = wide.num_workers(); w < step.layout.workers; ++w) writer.write_empty(w);
  for_each_tile(step, Section::kDecode,
                [&](const Tile& tile) { writer.write(count++, tile, 0, tile.units()); });
  header.num_narrow_items = count - header.first_narrow_item;
  return count;
}

// Whether a warp can attend to a tile and join the states of a prefill tile to its own.
bool is_joining(const Step& step, const Tile& tile) {
  return step.shape.wide_tiles && step.wide_units == 0 && tile.share != nullptr && tile.share->joins &&
         tile.units() <= kNarrowUnits;
}

// Many short tails behind prefill tiles are dealt to the warps of the last workers, in turns, and all else to
// the first ones. Returns the length of the section.
int32_t write_joining(Step& step, int64_t num_tails, JoinWriter& joins, WorkListHeader& header,
                      PieceWriter writer) {
  int64_t tiles = 0, units = 0;
  for_each_tile(step, Section::kDecode, [&](const Tile& tile) {
    if (is_joining(step, tile)) return;
    ++tiles;
    units += tile.units();
  });
  const int32_t workers = step.layout.workers;
  const int64_t cost = tiles * kItemCost + units * kUnitCost;
  const auto others = tiles == 0 ? 0
                                 : static_cast<int32_t>(std::clamp<int64_t>(
                                       workers * cost / (cost + num_tails * kTailCost), 1, workers - 1));
  int32_t count = workers;
  if (others > 0) {
    DecodeDealer dealer(tiles, units, 0, others, workers, writer);
    for_each_tile(step, Section::kDecode, [&](const Tile& tile) {
      if (!is_joining(step, tile)) dealer.add(tile);
    });
    count = dealer.finish();
  }
  for (int32_t w = others; w < workers; ++w) writer.write_empty(w);
  header.first_joining = MaybeIndex::of(others);
  header.first_narrow_item = count;
  const int32_t warps = (workers - others) * kNarrowPerWorker;
  writer.set_joins(&joins);
  for_each_tile(step, Section::kDecode, [&](const Tile& tile) {
    if (!is_joining(step, tile)) return;
    writer.write(count, tile, 0, tile.units());
    if (count - warps >= header.first_narrow_item) writer.link(count - warps, count);
    ++count;
  });
  header.num_narrow_items = count - header.first_narrow_item;
  return count;
}

int32_t write_decode(Step& step, JoinWriter& joins, WorkListHeader& header, PieceWriter writer) {
  int64_t tiles = 0, units = 0, joining = 0;
  bool narrow = step.wide_units > 0;  // all are short tails, which may wait for the wide tiles
  for_each_tile(step, Section::kDecode, [&](const Tile& tile) {
    ++tiles;
    units += tile.units();
    joining += is_joining(step, tile);
    narrow = narrow && tile.share != nullptr && tile.units() <= kNarrowUnits;
  });
  if (joining > kJoinsPerWorker * step.layout.workers && step.layout.workers > 1)
    return write_joining(step, joining, joins, header, writer);
  WideDealer wide(step.wide_units, step.layout, writer);
  header.num_wide_workers = wide.num_workers();
  const int64_t workers = step.layout.workers - wide.num_workers();
  const auto is_wide = [&](const SharedRun& run) { return reader_of(step, run) == Section::kWide; };
  const bool all_wide = std::all_of(step.runs.begin(), step.runs.end(), is_wide);
  const auto leaves_at_most = [&](int states) {
    return std::none_of(step.runs.begin(), step.runs.end(), [&](const SharedRun& run) {
      return is_wide(run) && run.num_keys > states * kUnitKeys;
    });
  };
  narrow =
      narrow && all_wide && leaves_at_most(kMostMailed) && tiles > workers && tiles <= kMostNarrow * workers;
  if (narrow) writer.set_mailed();
  if (narrow || (leaves_at_most(kMostJoined) && tiles <= kJoinsPerWorker * workers)) writer.set_joins(&joins);
  for_each_tile(step, Section::kWide, [&](const Tile& tile) { wide.add(tile); });
  if (narrow) return write_narrow(step, wide, header, writer);
  DecodeDealer dealer(tiles, units, wide.num_workers(), step.layout.workers, wide.num_items(), writer);
  for_each_tile(step, Section::kDecode, [&](const Tile& tile) { dealer.add(tile); });
  return dealer.finish();
}

int32_t write_uncut(Step& step, PieceWriter writer) {
  int32_t count = 0;
  for_each_tile(step, Section::kDecode,
                [&](const Tile& tile) { writer.write(count++, tile, 0, tile.units()); });
  return count;
}

int32_t write_prefill(Step& step, PieceWriter writer) {
  int64_t total_units = 0;
  bool all_shared = true;
  for_each_tile(step, Section::kPrefill, [&](const Tile& tile) {
    total_units += tile.units();
    all_shared = all_shared && tile.sharers != nullptr;
  });
  // Shared tiles have no diagonal: equal pieces take equal times, and fewer leave fewer states.
  const int64_t pieces_at_once = std::max(
      1, step.shape.num_multiprocessors * step.shape.prefill_blocks_per_sm / step.shape.num_kv_heads);
  const int64_t wanted = all_shared ? pieces_at_once : kPrefillPiecesPerShare * step.layout.workers;
  const int64_t longest = std::max(kMinPrefillUnits, (total_units - 1) / wanted + 1);
  int32_t count = 0;
  for_each_tile(step, Section::kPrefill, [&](const Tile& tile) {
    const int64_t units = tile.units();
    const int64_t pieces = (units + longest - 1) / longest;
    for (int64_t i = 0; i < pieces; ++i)
      writer.write(count++, tile, units * i / pieces, units * (i + 1) / pieces);
  });
  return count;
}

// Large items first, so that the last to begin are short. But those whose lengths differ by a small part of a
// worker's share stand with their sequence, whose keys the L2 then still has from one item to the next.
void sort_prefill(WorkItem* items, int32_t count, int workers) {
  const auto length = [](const WorkItem& item) { return static_cast<int64_t>(item.kv_end - item.kv_begin); };
  int64_t keys = 0;
  for (int32_t i = 0; i < count; ++i) keys += length(items[i]);
  const int64_t grain = std::max<int64_t>(kUnitKeys, keys / (workers * kPrefillGrains));
  std::stable_sort(items, items + count, [&](const WorkItem& a, const WorkItem& b) {
    const int64_t coarse_a = length(a) / grain, coarse_b = length(b) / grain;
    if (coarse_a != coarse_b) return coarse_a > coarse_b;
    if (a.sequence != b.sequence) return a.sequence < b.sequence;
    return length(a) > length(b);
  });
}

void check_batch(const WorkShape& shape, const BlockTableRows& batch) {
  check(batch.num_sequences <= shape.max_sequences, "more sequences than the work list was sized for");
  for (int64_t s = 0; s < batch.num_sequences; ++s) {
    const int32_t query_len = batch.query_start[s + 1] - batch.query_start[s];
    check(query_len >= 0 && batch.seq_lens[s] >= 0, "a negative length");
    check(!shape.causal || batch.seq_lens[s] == 0 || query_len <= batch.seq_lens[s],
          "a sequence has more queries than tokens");
  }
  check(batch.num_sequences == 0 || batch.query_start[batch.num_sequences] <= shape.max_tokens,
        "more tokens than the work list was sized for");
}

}  // namespace

WorkListLayout work_list_layout(const WorkShape& shape) {
  check(shape.num_kv_heads > 0 && shape.num_q_heads % shape.num_kv_heads == 0,
        "NQ must be a multiple of NKV");
  check(shape.window == 0 || shape.causal, "a window needs causal attention");
  check(shape.num_multiprocessors > 0 && shape.max_sequences >= 0 && shape.max_tokens >= 0,
        "a negative size");
  const int group = shape.group();
  const bool f32 = shape.dtype == DType::kF32;
  check(f32 || group <= prefill_tile_rows(shape.head_dim), "too many query heads per kv head");

  WorkListLayout layout{};
  layout.blocks = shape.num_multiprocessors * attention_blocks_per_sm(shape.head_dim);
  layout.workers = std::max(1, layout.blocks / shape.num_kv_heads);
  layout.wide_workers = f32 || !shape.wide_tiles ? 0 : 2 * layout.workers / 3;
  static_assert(kMinSharedKeys >= kWideUnits * kUnitKeys, "no more wide tiles than workers for them");
  layout.ticket_ints = kDrawnTickets + layout.wide_workers * shape.num_kv_heads;
  layout.decode_tokens = f32 ? std::max(1, kDecodeRows / group) : kDecodeRows / group;
  const bool prefill = !f32 && shape.max_tokens > layout.decode_tokens;
  layout.prefill_tokens = prefill ? prefill_tile_rows(shape.head_dim) / group : 0;

  // A cut adds one piece and makes at most two states, and a worker without work holds an item; a prefill
  // tile is cut into pieces of at least half the longest.
  const int64_t most_sequences = std::min(shape.max_sequences, shape.max_tokens);
  const int64_t decode_tiles =
      f32 ? shape.max_tokens : std::min(kFewTiles * most_sequences, shape.max_tokens);
  const int64_t shared_tiles = f32 ? 0 : most_sequences / 2;  // each has two sequences at least
  const int64_t decode_cuts = f32 ? 0 : layout.workers;
  const int64_t prefill_tiles =
      prefill ? shape.max_tokens / layout.prefill_tokens + shared_tiles +
                    std::min(shape.max_sequences, shape.max_tokens / (layout.decode_tokens + 1))
              : 0;
  const int64_t prefill_pieces = prefill ? 2 * kPrefillPiecesPerShare * layout.workers : 0;  // of cut tiles
  layout.max_decode_merges = f32 ? 0 : static_cast<int>(decode_tiles);
  layout.max_prefill_merges = static_cast<int>(std::min(prefill_pieces / 2, prefill_tiles));
  layout.merges = kHeaderInts;
  layout.decode_items = layout.merges + kMergeInts * (layout.max_decode_merges + layout.max_prefill_merges);
  const int64_t wide_units = kWideUnits * layout.wide_workers;
  layout.prefill_items =
      layout.decode_items + kItemInts * (decode_tiles + shared_tiles + 2 * decode_cuts + wide_units);
  layout.size = layout.prefill_items + kItemInts * (prefill_tiles + prefill_pieces);
  if (shape.causal && shape.window == 0)
    layout.mail_rows = static_cast<int>(wide_units) * prefill_tile_rows(shape.head_dim) +
                       kMostNarrow * layout.workers * group;
  // Every sequence may have a state of its tail and its rows in one of a shared tile.
  layout.state_rows = 2 * decode_cuts * kDecodeRows + prefill_pieces * prefill_tile_rows(shape.head_dim) +
                      wide_units * prefill_tile_rows(shape.head_dim) + (f32 ? 0 : 2 * most_sequences * group);
  return layout;
}

WorkListHeader build_work_list(const WorkShape& shape, const WorkListLayout& layout,
                               const BlockTableRows& batch, int32_t* buffer) {
  check_batch(shape, batch);
  Step step{shape, layout, batch};
  divide_sequences(step);
  find_shares(step);
  WorkListHeader header{};
  auto* merges = reinterpret_cast<MergeEntry*>(buffer + layout.merges);
  // Prefill first, since tails, which are decode tiles, ask for the states of the tiles they share.
  if (layout.prefill_tokens > 0) {
    auto* items = reinterpret_cast<WorkItem*>(buffer + layout.prefill_items);
    header.num_prefill_items = write_prefill(step, PieceWriter(items, merges, &header, shape.group()));
    sort_prefill(items, header.num_prefill_items, layout.workers);
  }
  auto* decode_items = reinterpret_cast<WorkItem*>(buffer + layout.decode_items);
  const PieceWriter decode(decode_items, merges, &header, shape.group());
  if (shape.dtype == DType::kF32) {
    header.num_decode_items = write_uncut(step, decode);
  } else {
    JoinWriter joins(buffer + layout.merges, layout);
    header.num_decode_items = write_decode(step, joins, header, decode);
    if (!step.runs.empty()) joins.finish(decode_items, header.num_decode_items);
    header.keys_are_old = shape.causal && header.num_prefill_items == 0 && has_old_keys(batch);
  }
  *reinterpret_cast<WorkListHeader*>(buffer) = header;
  return header;
}

}  // namespace bequest
