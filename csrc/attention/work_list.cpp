#include "attention/work_list.h"

#include <algorithm>

#include "core/check.h"

namespace bequest {
namespace {

constexpr int kItemInts = sizeof(WorkItem) / sizeof(int32_t);
constexpr int kMergeInts = sizeof(MergeEntry) / sizeof(int32_t);
constexpr int kHeaderInts = sizeof(WorkListHeader) / sizeof(int32_t);
static_assert(kItemInts == 8 && kMergeInts == 4 && kHeaderInts == 4,
              "the kernels read these as 16-byte vectors");

// Costs in quarters of a unit.
constexpr int64_t kUnitCost = 4;
constexpr int64_t kItemCost = 2;  // of starting and finishing a decode item, whatever its length
constexpr int64_t kSnap = 32;     // a decode cut closer to a tile's edge than share / kSnap moves there
constexpr int64_t kMinPrefillUnits = 4;  // a state costs more to store and merge than shorter pieces gain
constexpr int kPrefillPiecesPerShare = 2;

struct Tile {
  int32_t sequence;
  int32_t first_token;
  int32_t num_tokens;
  int32_t first_position;
  int32_t kv_begin;
  int32_t kv_end;

  int32_t first_unit_key() const { return kv_begin / kUnitKeys * kUnitKeys; }
  int64_t units() const { return (kv_end - first_unit_key() + kUnitKeys - 1) / kUnitKeys; }
};

bool is_decode(const WorkShape& shape, const WorkListLayout& layout, int32_t query_len) {
  return shape.dtype == DType::kF32 || query_len <= layout.decode_tokens;
}

// Calls f(tile) for the tiles of one section, in the order of the sequences.
template <class F>
void for_each_tile(const WorkShape& shape, const WorkListLayout& layout, const WorkBatch& batch, bool decode,
                   F&& f) {
  const int32_t tile_tokens = decode ? layout.decode_tokens : layout.prefill_tokens;
  for (int64_t s = 0; s < batch.num_sequences; ++s) {
    const int32_t query_len = batch.query_start[s + 1] - batch.query_start[s];
    const int32_t seq_len = batch.seq_lens[s];
    if (query_len == 0 || seq_len == 0 || is_decode(shape, layout, query_len) != decode) continue;
    for (int32_t done = 0; done < query_len; done += tile_tokens) {
      const int32_t tokens = std::min(tile_tokens, query_len - done);
      const int32_t position = seq_len - query_len + done + (shape.causal ? 0 : kFarPosition);
      const int32_t kv_end = std::min(seq_len, position + tokens);
      const int32_t kv_begin = shape.window > 0 ? std::max(0, position - shape.window + 1) : 0;
      f(Tile{static_cast<int32_t>(s), batch.query_start[s] + done, tokens, position, kv_begin, kv_end});
    }
  }
}

// Writes the pieces of tiles, and the merges of those that are cut.
class PieceWriter {
 public:
  PieceWriter(WorkItem* items, MergeEntry* merges, WorkListHeader* header, int group)
      : items_(items), merges_(merges), header_(header), group_(group) {}

  // Item `index`: the units [begin, end) of a tile. Pieces come in order, the last ends at tile.units().
  void write(int32_t index, const Tile& tile, int64_t begin, int64_t end) {
    const int32_t rows = tile.num_tokens * group_;
    const int64_t units = tile.units();
    const bool whole = begin == 0 && end == units;
    if (begin == 0) num_pieces_ = 0;
    const int32_t state_row = whole ? -1 : header_->num_state_rows + num_pieces_++ * rows;
    const int32_t origin = tile.first_unit_key();
    items_[index] = {tile.sequence,
                     tile.first_token,
                     tile.num_tokens,
                     tile.first_position,
                     std::max(tile.kv_begin, static_cast<int32_t>(origin + begin * kUnitKeys)),
                     std::min(tile.kv_end, static_cast<int32_t>(origin + end * kUnitKeys)),
                     state_row,
                     -1};
    if (whole || end < units) return;
    merges_[header_->num_merges++] = {tile.first_token, tile.num_tokens, header_->num_state_rows,
                                      num_pieces_};
    header_->num_state_rows += num_pieces_ * rows;
  }

  void write_empty(int32_t index) { items_[index] = {0, 0, 0, 0, 0, 0, -1, -1}; }
  void link(int32_t index, int32_t next) { items_[index].next = next; }

 private:
  WorkItem* const items_;
  MergeEntry* const merges_;
  WorkListHeader* const header_;
  const int32_t group_;
  int32_t num_pieces_ = 0;  // of the current tile
};

// Deals the line of decode tiles out to the workers.
class DecodeDealer {
 public:
  DecodeDealer(int64_t num_tiles, int64_t num_units, int workers, PieceWriter& writer)
      : total_(num_tiles * kItemCost + num_units * kUnitCost),
        parts_(std::clamp<int64_t>(num_units, 1, workers)),
        workers_(workers),
        writer_(writer),
        num_items_(workers) {}

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
    for (int32_t w = last_worker_ + 1; w < workers_; ++w) writer_.write_empty(w);
    return last_worker_ < 0 ? 0 : num_items_;
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
    const int32_t index = worker_ == last_worker_ ? num_items_++ : worker_;
    if (worker_ == last_worker_) writer_.link(last_index_, index);
    while (++last_worker_ < worker_) writer_.write_empty(last_worker_);
    last_worker_ = worker_;
    last_index_ = index;
    return index;
  }

  const int64_t total_;  // cost of all tiles: the length of the line
  const int64_t parts_;  // workers that get a share
  const int32_t workers_;
  PieceWriter& writer_;
  int64_t line_ = 0;  // cost of the tiles so far
  int32_t worker_ = 0;
  int32_t last_worker_ = -1;  // the last that got an item
  int32_t last_index_ = -1;   // that item
  int32_t num_items_;
};

int32_t write_decode(const WorkShape& shape, const WorkListLayout& layout, const WorkBatch& batch,
                     PieceWriter writer) {
  int64_t tiles = 0, units = 0;
  for_each_tile(shape, layout, batch, true, [&](const Tile& tile) {
    ++tiles;
    units += tile.units();
  });
  DecodeDealer dealer(tiles, units, layout.workers, writer);
  for_each_tile(shape, layout, batch, true, [&](const Tile& tile) { dealer.add(tile); });
  return dealer.finish();
}

int32_t write_uncut(const WorkShape& shape, const WorkListLayout& layout, const WorkBatch& batch,
                    PieceWriter writer) {
  int32_t count = 0;
  for_each_tile(shape, layout, batch, true,
                [&](const Tile& tile) { writer.write(count++, tile, 0, tile.units()); });
  return count;
}

int32_t write_prefill(const WorkShape& shape, const WorkListLayout& layout, const WorkBatch& batch,
                      PieceWriter writer) {
  int64_t total_units = 0;
  for_each_tile(shape, layout, batch, false, [&](const Tile& tile) { total_units += tile.units(); });
  const int64_t longest =
      std::max(kMinPrefillUnits, total_units / (kPrefillPiecesPerShare * layout.workers) + 1);
  int32_t count = 0;
  for_each_tile(shape, layout, batch, false, [&](const Tile& tile) {
    const int64_t units = tile.units();
    const int64_t pieces = (units + longest - 1) / longest;
    for (int64_t i = 0; i < pieces; ++i)
      writer.write(count++, tile, units * i / pieces, units * (i + 1) / pieces);
  });
  return count;
}

void check_batch(const WorkShape& shape, const WorkBatch& batch) {
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
  layout.decode_tokens = f32 ? std::max(1, kDecodeRows / group) : kDecodeRows / group;
  const bool prefill = !f32 && shape.max_tokens > layout.decode_tokens;
  layout.prefill_tokens = prefill ? prefill_tile_rows(shape.head_dim) / group : 0;

  // A cut adds one piece and makes at most two states, and a worker without work holds an item; a prefill
  // tile is cut into pieces of at least half the longest.
  const int64_t decode_tiles = f32 ? shape.max_tokens : std::min(shape.max_sequences, shape.max_tokens);
  const int64_t decode_cuts = f32 ? 0 : layout.workers;
  const int64_t prefill_tiles =
      prefill ? shape.max_tokens / layout.prefill_tokens +
                    std::min(shape.max_sequences, shape.max_tokens / (layout.decode_tokens + 1))
              : 0;
  const int64_t prefill_pieces = prefill ? 2 * kPrefillPiecesPerShare * layout.workers : 0;  // of cut tiles
  layout.max_decode_merges = static_cast<int>(std::min(decode_cuts, decode_tiles));
  layout.max_prefill_merges = static_cast<int>(std::min(prefill_pieces / 2, prefill_tiles));
  layout.merges = kHeaderInts;
  layout.decode_items = layout.merges + kMergeInts * (layout.max_decode_merges + layout.max_prefill_merges);
  layout.prefill_items = layout.decode_items + kItemInts * (decode_tiles + 2 * decode_cuts);
  layout.size = layout.prefill_items + kItemInts * (prefill_tiles + prefill_pieces);
  layout.state_rows = 2 * decode_cuts * kDecodeRows + prefill_pieces * prefill_tile_rows(shape.head_dim);
  return layout;
}

WorkListHeader build_work_list(const WorkShape& shape, const WorkListLayout& layout, const WorkBatch& batch,
                               int32_t* buffer) {
  check_batch(shape, batch);
  WorkListHeader header{};
  auto* merges = reinterpret_cast<MergeEntry*>(buffer + layout.merges);
  auto* decode_items = reinterpret_cast<WorkItem*>(buffer + layout.decode_items);
  const PieceWriter decode(decode_items, merges, &header, shape.group());
  header.num_decode_items = shape.dtype == DType::kF32 ? write_uncut(shape, layout, batch, decode)
                                                       : write_decode(shape, layout, batch, decode);
  if (layout.prefill_tokens > 0) {
    auto* items = reinterpret_cast<WorkItem*>(buffer + layout.prefill_items);
    header.num_prefill_items =
        write_prefill(shape, layout, batch, PieceWriter(items, merges, &header, shape.group()));
    std::stable_sort(items, items + header.num_prefill_items, [](const WorkItem& a, const WorkItem& b) {
      return a.kv_end - a.kv_begin > b.kv_end - b.kv_begin;
    });
  }
  *reinterpret_cast<WorkListHeader*>(buffer) = header;
  return header;
}

}  // namespace bequest
