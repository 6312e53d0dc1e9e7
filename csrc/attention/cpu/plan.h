// The work of one step's attention, found once and walked by every layer.
//
// The queries of a sequence are cut into tiles, the keys into splits at fixed absolute positions. A work item
// is one query tile with a range of splits (each for every kv head). An item that has all splits of its tile
// writes the result; otherwise the items of a tile leave one partial softmax state per split, and a second
// pass merges them. Both ways merge the same states in the same order, so how the plan cuts the work (which
// depends on the number of threads and on the other sequences) cannot change a bit of the result.
//
// Sequences that share their first blocks (shared_prefix.h) have the whole splits of these in a tile of their
// own, whose rows are the queries of all of them; what is left of each is its tail. A split's state is the
// same wherever its row is computed, so that this changes no bit either.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace bequest {

// Keys are walked in tiles, and a softmax state spans one split; both begin at multiples of their size,
// whatever the block size.
inline constexpr int kKeyTile = 64;
inline constexpr int kSplit = 512;
// Rows (query token × head of the kv head's group) of a query tile: large enough that packing a tile of keys
// is a small part of the work, small enough that a tile's state stays in L2.
inline constexpr int kMaxTileRows = 384;

struct AttentionShape {
  int num_q_heads;
  int num_kv_heads;
  int head_dim;
  int block_size;
  int num_blocks;  // of the cache; block tables are checked against it
  bool causal;     // else every query sees all seq_len keys
  int window;      // a query at p sees keys in (p - window, p]; 0: all. REQUIRES: causal if not 0
  bool bfloat16;   // products may be rounded to it, and are where the chip has units for them

  int group() const { return num_q_heads / num_kv_heads; }
};

// Queries [first_token, first_token + num_tokens) of the step, of one sequence or of several that share keys.
struct QueryTile {
  int32_t sequence;     // whose block table holds the keys
  int32_t first_token;  // in [0, T)
  int32_t num_tokens;
  int32_t first_position;  // of first_token in its sequence
  int32_t seq_len;
  int32_t key_begin;  // [key_begin, key_end): keys that some query of the tile sees
  int32_t key_end;
  int64_t partial;           // where its partial states begin, in floats; -1: its one item writes the result
  int32_t shared_tile = -1;  // of a tail: has the states of the splits before it

  int split_begin() const { return key_begin / kSplit; }
  int split_end() const { return (key_end + kSplit - 1) / kSplit; }
};

// States of some splits, one after another: those of the rows from first_row on are meant.
struct SplitStates {
  const float* states;  // [num_splits] of StateRows of `rows` rows
  int num_splits;
  int64_t rows;
  int64_t first_row;
};

struct WorkItem {
  int32_t tile;
  int32_t split_begin;
  int32_t split_end;
};

struct AttentionBatch {
  const int32_t* query_start;   // [S + 1]
  const int32_t* seq_lens;      // [S], computed tokens after this step
  const int32_t* block_tables;  // [S, MB]
  int64_t num_sequences;
  int64_t max_blocks;  // MB
};

// Owns what it was built from and the kernels' memory, so it serves one call at a time.
class AttentionPlan {
 public:
  // Throws on inconsistent lengths and on a block id outside [0, NB) among a sequence's ceil(seq_len / BS).
  AttentionPlan(const AttentionBatch& batch, const AttentionShape& shape);

  const AttentionShape& shape() const { return shape_; }
  int64_t num_tokens() const { return num_tokens_; }
  const std::vector<QueryTile>& tiles() const { return tiles_; }
  const std::vector<WorkItem>& items() const { return items_; }
  int64_t num_long_items() const { return num_long_items_; }  // the first ones: of tiles of many queries
  const std::vector<int32_t>& merged_tiles() const { return merged_tiles_; }  // whose states make the result
  const int32_t* blocks(const QueryTile& tile) const { return blocks_.data() + block_start_[tile.sequence]; }

  int padded_dim() const { return (shape_.head_dim + 15) / 16 * 16; }
  // Floats of one softmax state per row of `tile`: o [rows, padded_dim], m [rows], d [rows].
  int64_t state_floats(const QueryTile& tile) const {
    return int64_t{tile.num_tokens} * shape_.group() * (padded_dim() + 2);
  }
  // The state of (tile, kv head, split). REQUIRES: tile.partial >= 0.
  float* partial_state(const QueryTile& tile, int head, int split) const {
    const int64_t splits = tile.split_end() - tile.split_begin();
    return partials_.get() + tile.partial + (head * splits + split - tile.split_begin()) * state_floats(tile);
  }
  // All states of a tile and kv head, of its own splits and, if there are some, of those it shares.
  SplitStates own_states(const QueryTile& tile, int head) const;
  SplitStates shared_states(const QueryTile& tile, int head) const;
  float* scratch(int worker) const { return scratch_.get() + worker * scratch_floats_; }
  int num_workers() const { return num_workers_; }
  bool has_units() const { return has_units_; }  // that multiply bfloat16, and may

 private:
  void check_sequence(const AttentionBatch& batch, int64_t s) const;
  void add_shared_tiles(const AttentionBatch& batch);
  void add_tiles(const AttentionBatch& batch, int64_t s);
  void add_items();
  void allocate();

  AttentionShape shape_;
  int64_t num_tokens_ = 0;
  int num_workers_ = 1;
  bool has_units_ = false;
  std::vector<int32_t> blocks_;
  std::vector<int64_t> block_start_;
  std::vector<QueryTile> tiles_;
  std::vector<WorkItem> items_;
  int64_t num_long_items_ = 0;
  std::vector<int32_t> merged_tiles_;
  std::vector<int32_t> shared_tiles_;  // [S] the shared tile of a sequence, -1; or none if nothing is shared
  int64_t scratch_floats_ = 0;
  std::unique_ptr<float[]> scratch_;
  std::unique_ptr<float[]> partials_;
};

}  // namespace bequest
