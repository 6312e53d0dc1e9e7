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

struct SectionRules {
  int64_t item_cost;  // of starting and finishing an item, whatever its length
  int64_t min_units;  // per worker: rather fewer workers than shorter pieces
  int64_t snap;       // a cut this close to a tile's edge (share / snap) moves to the edge; 0: every cut does
};
constexpr SectionRules kDecodeRules{2, 1, 32};
constexpr SectionRules kPrefillRules{4, 4, 16};
constexpr SectionRules kUncutRules{2, 1, 0};

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

// Writes one section: deals the line of tiles out to its workers.
class SectionWriter {
 public:
  SectionWriter(const SectionRules& rules, int64_t total_cost, int64_t total_units, int workers, int group,
                WorkItem* items, MergeEntry* merges, WorkListHeader* header)
      : rules_(rules),
        total_cost_(total_cost),
        parts_(std::clamp<int64_t>(total_units / rules.min_units, 1, workers)),
        workers_(workers),
        slack_(rules.snap == 0 ? 0 : total_cost / parts_ / rules.snap),
        group_(group),
        items_(items),
        merges_(merges),
        header_(header),
        num_items_(workers) {}

  void add(const Tile& tile) {
    const int64_t units = tile.units();
    const int64_t end_cost = line_ + rules_.item_cost + units * kUnitCost;
    const int32_t first_state_row = header_->num_state_rows;
    int32_t pieces = 0;
    for (int64_t begin = 0; begin < units;) {
      const int64_t end = piece_end(units, begin, end_cost);
      if (end > begin) {
        const bool whole = begin == 0 && end == units;
        emit(tile, begin, end, whole ? -1 : first_state_row + pieces * tile.num_tokens * group_);
        ++pieces;
      }
      if (end < units) ++worker_;
      begin = end;
    }
    line_ = end_cost;
    while (worker_ + 1 < parts_ && cut(worker_ + 1) <= line_) ++worker_;
    if (pieces < 2) return;
    merges_[header_->num_merges++] = {tile.first_token, tile.num_tokens, first_state_row, pieces};
    header_->num_state_rows += pieces * tile.num_tokens * group_;
  }

  // Marks the workers that got nothing; returns how many items were written.
  int32_t finish() {
    for (int32_t w = last_worker_ + 1; w < workers_; ++w) items_[w] = kNoWork;
    return written_;
  }

 private:
  static constexpr WorkItem kNoWork{0, 0, 0, 0, 0, 0, -1, -1};

  // The place on the line where worker w begins.
  int64_t cut(int64_t w) const { return w * total_cost_ / parts_; }

  // Where the current worker's piece of a tile, begun at unit `begin`, ends.
  int64_t piece_end(int64_t units, int64_t begin, int64_t end_cost) const {
    const int64_t next_cut = cut(worker_ + 1);
    if (worker_ + 1 >= parts_ || next_cut >= end_cost) return units;
    const int64_t offset = std::max<int64_t>(0, next_cut - line_ - rules_.item_cost);
    if (rules_.snap == 0) return begin == 0 && 2 * offset < units * kUnitCost ? 0 : units;
    const int64_t end = std::clamp((offset + kUnitCost / 2) / kUnitCost, begin, units);
    if ((units - end) * kUnitCost <= slack_) return units;
    if (begin == 0 && end * kUnitCost <= slack_) return 0;
    return end;
  }

  void emit(const Tile& tile, int64_t begin, int64_t end, int32_t state_row) {
    int32_t index = worker_;
    if (worker_ == last_worker_) {
      index = num_items_++;
      items_[last_item_].next = index;
    } else {
      for (int32_t w = last_worker_ + 1; w < worker_; ++w) items_[w] = kNoWork;
      last_worker_ = worker_;
    }
    const int32_t origin = tile.first_unit_key();
    items_[index] = {tile.sequence,
                     tile.first_token,
                     tile.num_tokens,
                     tile.first_position,
                     std::max(tile.kv_begin, static_cast<int32_t>(origin + begin * kUnitKeys)),
                     std::min(tile.kv_end, static_cast<int32_t>(origin + end * kUnitKeys)),
                     state_row,
                     -1};
    last_item_ = index;
    ++written_;
  }

  const SectionRules rules_;
  const int64_t total_cost_;
  const int64_t parts_;  // workers that get a share
  const int32_t workers_;
  const int64_t slack_;
  const int32_t group_;
  WorkItem* const items_;
  MergeEntry* const merges_;
  WorkListHeader* const header_;
  int64_t line_ = 0;  // cost of the tiles so far
  int32_t worker_ = 0;
  int32_t last_worker_ = -1;
  int32_t last_item_ = -1;
  int32_t num_items_;
  int32_t written_ = 0;
};

int32_t write_section(const WorkShape& shape, const WorkListLayout& layout, const WorkBatch& batch,
                      bool decode, int32_t* buffer, WorkListHeader* header) {
  const int workers = decode ? layout.decode_workers : layout.prefill_workers;
  const SectionRules rules = shape.dtype == DType::kF32 ? kUncutRules : decode ? kDecodeRules : kPrefillRules;
  int64_t tiles = 0, units = 0;
  for_each_tile(shape, layout, batch, decode, [&](const Tile& tile) {
    ++tiles;
    units += tile.units();
  });
  auto* items = reinterpret_cast<WorkItem*>(buffer + (decode ? layout.decode_items : layout.prefill_items));
  auto* merges = reinterpret_cast<MergeEntry*>(buffer + layout.merges);
  SectionWriter writer(rules, tiles * rules.item_cost + units * kUnitCost, units, workers, shape.group(),
                       items, merges, header);
  for_each_tile(shape, layout, batch, decode, [&](const Tile& tile) { writer.add(tile); });
  return writer.finish();
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
  const int blocks = shape.num_multiprocessors * attention_blocks_per_sm(shape.head_dim);
  const int workers = std::max(1, blocks / shape.num_kv_heads);
  layout.decode_tokens = f32 ? std::max(1, kDecodeRows / group) : kDecodeRows / group;
  layout.prefill_tokens = std::max(1, prefill_tile_rows(shape.head_dim) / group);
  layout.decode_workers = workers;
  const int64_t longest = shape.max_tokens;  // of one sequence's queries
  layout.prefill_workers = !f32 && longest > layout.decode_tokens ? workers : 0;

  // Every cut adds at most one piece, and a worker without work holds one entry.
  const int64_t decode_tiles = f32 ? shape.max_tokens : std::min(shape.max_sequences, shape.max_tokens);
  const int64_t prefill_tiles =
      layout.prefill_workers == 0
          ? 0
          : shape.max_tokens / layout.prefill_tokens +
                std::min(shape.max_sequences, shape.max_tokens / (layout.decode_tokens + 1));
  layout.merges = kHeaderInts;
  layout.decode_items = layout.merges + kMergeInts * (layout.decode_workers + layout.prefill_workers);
  layout.prefill_items = layout.decode_items + kItemInts * (decode_tiles + 2 * layout.decode_workers);
  layout.size = layout.prefill_items + kItemInts * (prefill_tiles + 2 * layout.prefill_workers);
  layout.state_rows = f32 ? 0
                          : 2 * (int64_t{layout.decode_workers} * kDecodeRows +
                                 int64_t{layout.prefill_workers} * prefill_tile_rows(shape.head_dim));
  return layout;
}

WorkListHeader build_work_list(const WorkShape& shape, const WorkListLayout& layout, const WorkBatch& batch,
                               int32_t* buffer) {
  check_batch(shape, batch);
  WorkListHeader header{};
  header.num_decode_items = write_section(shape, layout, batch, true, buffer, &header);
  if (layout.prefill_workers > 0)
    header.num_prefill_items = write_section(shape, layout, batch, false, buffer, &header);
  *reinterpret_cast<WorkListHeader*>(buffer) = header;
  return header;
}

}  // namespace bequest
