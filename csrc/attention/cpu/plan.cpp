#include "attention/cpu/plan.h"

#include <algorithm>
#include <string>

#include "attention/cpu/amx_scratch.h"
#include "attention/cpu/scratch.h"
#include "attention/shared_prefix.h"
#include "core/check.h"
#include "core/isa.h"
#include "core/threads.h"

namespace bequest {
namespace {

// Packing a tile of keys and values costs about as much as attending with this many rows.
constexpr int64_t kPackingRows = 8;
// Items per thread when the keys of a tile are split: enough for a late thread not to matter.
constexpr int64_t kItemsPerThread = 4;

int64_t cost(const QueryTile& tile, int group) {
  return (int64_t{tile.num_tokens} * group + kPackingRows) * (tile.key_end - tile.key_begin);
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

AttentionPlan::AttentionPlan(const AttentionBatch& batch, const AttentionShape& shape)
    : shape_(shape),
      num_workers_(bequest::num_threads()),
      has_units_(shape.bfloat16 && current_isa() == Isa::kAmx) {
  check(shape.num_kv_heads > 0 && shape.num_q_heads > 0 && shape.num_q_heads % shape.num_kv_heads == 0,
        "attention: the query heads must be a multiple of the kv heads");
  check(shape.head_dim > 0 && shape.block_size > 0 && shape.num_blocks > 0, "attention: empty shape");
  check(shape.window >= 0 && (shape.window == 0 || shape.causal), "attention: a window needs a causal mask");
  check(batch.query_start[0] == 0, "attention: query_start must begin with 0");
  num_tokens_ = batch.query_start[batch.num_sequences];
  for (int64_t s = 0; s < batch.num_sequences; ++s) check_sequence(batch, s);
  add_shared_tiles(batch);
  for (int64_t s = 0; s < batch.num_sequences; ++s) add_tiles(batch, s);
  add_items();
  allocate();
}

void AttentionPlan::check_sequence(const AttentionBatch& batch, int64_t s) const {
  const int64_t query_len = int64_t{batch.query_start[s + 1]} - batch.query_start[s];
  const int64_t seq_len = batch.seq_lens[s];
  const std::string name = "attention: sequence " + std::to_string(s);
  if (query_len < 0) fail(name + ": query_start falls");
  if (seq_len < 0) fail(name + ": negative seq_len");
  if (query_len == 0) return;
  if (shape_.causal && query_len > seq_len) fail(name + ": more queries than tokens");
  if (ceil_div(seq_len, shape_.block_size) > batch.max_blocks)
    fail(name + ": seq_len exceeds its block table");
}

void AttentionPlan::add_shared_tiles(const AttentionBatch& batch) {
  if (!shape_.causal || shape_.window > 0) return;
  const BlockTableRows rows{batch.query_start,   batch.seq_lens,   batch.block_tables,
                            batch.num_sequences, batch.max_blocks, shape_.block_size};
  const int32_t tile_tokens = std::max(1, kMaxTileRows / shape_.group());
  for (const SharedRun& run : find_shared_runs(rows, kSplit)) {
    shared_tiles_.resize(batch.num_sequences, -1);
    for (int32_t done = 0; done < run.count; done += tile_tokens) {
      const int32_t first = run.first + done;
      const int32_t tokens = std::min(tile_tokens, run.count - done);
      std::fill_n(shared_tiles_.begin() + first, tokens, static_cast<int32_t>(tiles_.size()));
      // At a position behind its last key a query sees them all.
      tiles_.push_back(
          {first, batch.query_start[first], tokens, run.num_keys, run.num_keys, 0, run.num_keys, -1});
    }
  }
}

void AttentionPlan::add_tiles(const AttentionBatch& batch, int64_t s) {
  const int32_t begin = batch.query_start[s];
  const int32_t end = batch.query_start[s + 1];
  block_start_.push_back(static_cast<int64_t>(blocks_.size()));
  if (begin == end) return;
  const int32_t seq_len = batch.seq_lens[s];
  const int32_t* table = batch.block_tables + s * batch.max_blocks;
  const int64_t used = ceil_div(seq_len, shape_.block_size);
  blocks_.insert(blocks_.end(), table, table + used);
  for (int64_t i = 0; i < used; ++i) {
    if (table[i] < 0 || table[i] >= shape_.num_blocks)
      fail("attention: block " + std::to_string(table[i]) + " of sequence " + std::to_string(s) +
           " is outside the cache");
  }
  const int32_t tile_tokens = std::max(1, kMaxTileRows / shape_.group());
  for (int32_t first = begin; first < end; first += tile_tokens) {
    const int32_t tokens = std::min(tile_tokens, end - first);
    const int32_t position = seq_len - (end - first);
    const int32_t shared_tile = shared_tiles_.empty() ? -1 : shared_tiles_[s];
    int32_t key_begin = shape_.window ? std::max(0, position + 1 - shape_.window) : 0;
    if (shared_tile >= 0) key_begin = tiles_[shared_tile].key_end;
    const int32_t key_end = shape_.causal ? position + tokens : seq_len;
    tiles_.push_back(
        {static_cast<int32_t>(s), first, tokens, position, seq_len, key_begin, key_end, -1, shared_tile});
  }
}

// Tiles of many queries come first, those with the most keys first among them: the long items are under way
// before the short ones fill the gaps.
void AttentionPlan::add_items() {
  int64_t total = 0;
  for (const QueryTile& tile : tiles_) total += cost(tile, shape_.group());
  const int64_t target = total * shape_.num_kv_heads / (num_workers_ * kItemsPerThread) + 1;
  int64_t partial_floats = 0;
  // The first tiles are the shared ones.
  const int32_t num_shared =
      shared_tiles_.empty() ? 0 : 1 + *std::max_element(shared_tiles_.begin(), shared_tiles_.end());
  const auto add = [&](int32_t index) {
    QueryTile& tile = tiles_[index];
    const int splits = tile.split_end() - tile.split_begin();
    const int64_t wish = num_workers_ == 1 ? 1 : ceil_div(cost(tile, shape_.group()), target);
    const int pieces = static_cast<int>(std::clamp<int64_t>(wish, 1, std::max(splits, 1)));
    const bool shared = index < num_shared;
    if (pieces > 1 || shared || tile.shared_tile >= 0) {
      tile.partial = partial_floats;
      partial_floats += state_floats(tile) * splits * shape_.num_kv_heads;
      if (!shared) merged_tiles_.push_back(index);
    }
    for (int i = 0; i < pieces; ++i)
      items_.push_back(
          {index, tile.split_begin() + splits * i / pieces, tile.split_begin() + splits * (i + 1) / pieces});
  };
  const auto count = static_cast<int32_t>(tiles_.size());
  for (int32_t i = count - 1; i >= 0; --i)
    if (tiles_[i].num_tokens > 1) add(i);
  num_long_items_ = static_cast<int64_t>(items_.size());
  for (int32_t i = 0; i < count; ++i)
    if (tiles_[i].num_tokens == 1) add(i);
  if (partial_floats > 0) partials_ = std::make_unique_for_overwrite<float[]>(partial_floats);
}

SplitStates AttentionPlan::own_states(const QueryTile& tile, int head) const {
  return {partial_state(tile, head, tile.split_begin()), tile.split_end() - tile.split_begin(),
          int64_t{tile.num_tokens} * shape_.group(), 0};
}

SplitStates AttentionPlan::shared_states(const QueryTile& tile, int head) const {
  if (tile.shared_tile < 0) return {nullptr, 0, 0, 0};
  const QueryTile& shared = tiles_[tile.shared_tile];
  SplitStates states = own_states(shared, head);
  states.first_row = int64_t{tile.first_token - shared.first_token} * shape_.group();
  return states;
}

void AttentionPlan::allocate() {
  int64_t most_rows = 0;
  for (const QueryTile& tile : tiles_)
    most_rows = std::max<int64_t>(most_rows, int64_t{tile.num_tokens} * shape_.group());
  scratch_floats_ = has_units_ ? AmxScratch::floats(most_rows, shape_.head_dim, padded_dim())
                               : AttentionScratch::floats(most_rows, shape_.head_dim, padded_dim());
  scratch_ = std::make_unique_for_overwrite<float[]>(scratch_floats_ * num_workers_);
}

}  // namespace bequest
