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

constexpr int64_t kShortShare = 16 * kUnitCost;  // shares up to this are one piece
constexpr int64_t kPieceParts = 32;              // the smallest piece is this part of a share
constexpr int kPiecesPerShare = 7;               // at most: 1/2 + 1/4 + 1/8 + 1/16 + 1/32 + 1/32 and rounding
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
      const int32_t position = shape.causal ? seq_len - query_len + done : seq_len;
      const int32_t kv_end = std::min(seq_len, position + tokens);
      const int32_t kv_begin = shape.window > 0 ? std::max(0, position - shape.window + 1) : 0;
      f(Tile{static_cast<int32_t>(s), batch.query_start[s] + done, tokens, position, kv_begin, kv_end});
    }
  }
}

// Where the line of decode units is cut: equal pieces, or ever smaller ones.
class Cuts {
 public:
  Cuts(int64_t total, int64_t parts)
      : total_(total), parts_(parts), smallest_(std::max(2 * kUnitCost, total / parts / kPieceParts)) {
    begin_phase();
  }

  int64_t next() const { return origin_ + index_ * span_ / count_; }
  bool is_last() const { return origin_ + span_ == total_ && index_ == count_; }
  int64_t piece() const { return span_ / count_; }
  void advance() {
    if (index_ < count_) {
      ++index_;
    } else if (origin_ + span_ < total_) {
      origin_ += span_;
      begin_phase();
    }
  }

 private:
  void begin_phase() {
    const int64_t rest = total_ - origin_;
    const bool equal = total_ / parts_ <= kShortShare;
    const bool halve = !equal && rest / 2 / parts_ > smallest_;
    span_ = halve ? rest / 2 : rest;
    count_ = halve || equal ? parts_ : std::max<int64_t>(1, rest / smallest_);
    index_ = 1;
  }

  const int64_t total_, parts_, smallest_;
  int64_t origin_ = 0, span_ = 0, count_ = 1, index_ = 1;
};

// Appends items and the merges of cut tiles.
class ListWriter {
 public:
  ListWriter(WorkItem* items, MergeEntry* merges, WorkListHeader* header, int group)
      : items_(items), merges_(merges), header_(header), group_(group) {}

  int32_t num_items() const { return num_items_; }

  // The units [begin, end) of a tile; pieces come in order, and the last ends at tile.units().
  void add_piece(const Tile& tile, int64_t begin, int64_t end) {
    const int32_t rows = tile.num_tokens * group_;
    const int64_t units = tile.units();
    const bool whole = begin == 0 && end == units;
    if (begin == 0) num_pieces_ = 0;
    const int32_t state_row = whole ? -1 : header_->num_state_rows + num_pieces_++ * rows;
    const int32_t origin = tile.first_unit_key();
    items_[num_items_++] = {tile.sequence,
                            tile.first_token,
                            tile.num_tokens,
                            tile.first_position,
                            std::max(tile.kv_begin, static_cast<int32_t>(origin + begin * kUnitKeys)),
                            std::min(tile.kv_end, static_cast<int32_t>(origin + end * kUnitKeys)),
                            state_row,
                            rows};
    if (whole || end < units) return;
    merges_[header_->num_merges++] = {tile.first_token, tile.num_tokens, header_->num_state_rows,
                                      num_pieces_};
    header_->num_state_rows += num_pieces_ * rows;
  }

 private:
  WorkItem* const items_;
  MergeEntry* const merges_;
  WorkListHeader* const header_;
  const int32_t group_;
  int32_t num_items_ = 0;
  int32_t num_pieces_ = 0;  // of the current tile
};

// The unit at which a piece of the tile at `line`, begun at unit `begin`, ends. A cut near an edge moves
// there.
int64_t piece_end(const Cuts& cuts, int64_t line, int64_t units, int64_t begin) {
  if (cuts.is_last() || cuts.next() >= line + kItemCost + units * kUnitCost) return units;
  const int64_t offset = std::max<int64_t>(0, cuts.next() - line - kItemCost);
  const int64_t end = std::clamp((offset + kUnitCost / 2) / kUnitCost, begin, units);
  const int64_t slack = cuts.piece() / 32;
  if ((units - end) * kUnitCost <= slack) return units;
  if (begin == 0 && end * kUnitCost <= slack) return 0;
  return end;
}

void write_decode(const WorkShape& shape, const WorkListLayout& layout, const WorkBatch& batch,
                  ListWriter& writer) {
  int64_t tiles = 0, total_units = 0;
  for_each_tile(shape, layout, batch, true, [&](const Tile& tile) {
    ++tiles;
    total_units += tile.units();
  });
  Cuts cuts(tiles * kItemCost + total_units * kUnitCost, std::clamp<int64_t>(total_units, 1, layout.workers));
  int64_t line = 0;  // cost of the tiles so far
  for_each_tile(shape, layout, batch, true, [&](const Tile& tile) {
    const int64_t units = tile.units();
    for (int64_t begin = 0; begin < units;) {
      const int64_t end = piece_end(cuts, line, units, begin);
      if (end > begin) writer.add_piece(tile, begin, end);
      if (end < units) cuts.advance();
      begin = end;
    }
    line += kItemCost + units * kUnitCost;
    while (!cuts.is_last() && cuts.next() <= line) cuts.advance();
  });
}

void write_prefill(const WorkShape& shape, const WorkListLayout& layout, const WorkBatch& batch,
                   ListWriter& writer) {
  int64_t total_units = 0;
  for_each_tile(shape, layout, batch, false, [&](const Tile& tile) { total_units += tile.units(); });
  const int64_t longest =
      std::max(kMinPrefillUnits, total_units / (kPrefillPiecesPerShare * layout.workers) + 1);
  for_each_tile(shape, layout, batch, false, [&](const Tile& tile) {
    const int64_t units = tile.units();
    const int64_t pieces = (units + longest - 1) / longest;
    for (int64_t i = 0; i < pieces; ++i) writer.add_piece(tile, units * i / pieces, units * (i + 1) / pieces);
  });
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

  // A cut adds one piece and makes at most two states; a prefill tile is cut into pieces of at least half the
  // longest.
  const int64_t decode_tiles = f32 ? shape.max_tokens : std::min(shape.max_sequences, shape.max_tokens);
  const int64_t decode_cuts = f32 ? 0 : kPiecesPerShare * layout.workers;
  const int64_t prefill_tiles =
      prefill ? shape.max_tokens / layout.prefill_tokens +
                    std::min(shape.max_sequences, shape.max_tokens / (layout.decode_tokens + 1))
              : 0;
  const int64_t prefill_pieces = prefill ? 2 * kPrefillPiecesPerShare * layout.workers : 0;  // of cut tiles
  layout.max_decode_merges = static_cast<int>(std::min(decode_cuts, decode_tiles));
  layout.max_prefill_merges = static_cast<int>(std::min(prefill_pieces / 2, prefill_tiles));
  layout.merges = kHeaderInts;
  layout.decode_items = layout.merges + kMergeInts * (layout.max_decode_merges + layout.max_prefill_merges);
  layout.prefill_items = layout.decode_items + kItemInts * (decode_tiles + decode_cuts);
  layout.size = layout.prefill_items + kItemInts * (prefill_tiles + prefill_pieces);
  layout.state_rows = 2 * decode_cuts * kDecodeRows + prefill_pieces * prefill_tile_rows(shape.head_dim);
  return layout;
}

WorkListHeader build_work_list(const WorkShape& shape, const WorkListLayout& layout, const WorkBatch& batch,
                               int32_t* buffer) {
  check_batch(shape, batch);
  WorkListHeader header{};
  auto* merges = reinterpret_cast<MergeEntry*>(buffer + layout.merges);
  ListWriter decode(reinterpret_cast<WorkItem*>(buffer + layout.decode_items), merges, &header,
                    shape.group());
  if (shape.dtype == DType::kF32)
    for_each_tile(shape, layout, batch, true,
                  [&](const Tile& tile) { decode.add_piece(tile, 0, tile.units()); });
  else
    write_decode(shape, layout, batch, decode);
  header.num_decode_items = decode.num_items();
  if (layout.prefill_tokens > 0) {
    auto* items = reinterpret_cast<WorkItem*>(buffer + layout.prefill_items);
    ListWriter prefill(items, merges, &header, shape.group());
    write_prefill(shape, layout, batch, prefill);
    header.num_prefill_items = prefill.num_items();
    std::stable_sort(items, items + prefill.num_items(), [](const WorkItem& a, const WorkItem& b) {
      return a.kv_end - a.kv_begin > b.kv_end - b.kv_begin;
    });
  }
  *reinterpret_cast<WorkListHeader*>(buffer) = header;
  return header;
}

}  // namespace bequest
