// The tiles of a step, before they are cut and dealt out: what each sequence has by itself, and what runs of
// sequences share. Internal to the work list.
#pragma once

#include <algorithm>
#include <vector>

#include "attention/cuda/work_list.h"

namespace bequest {

inline constexpr int kWideUnits = 2;        // of a worker, at most
inline constexpr int kNarrowPerWorker = 4;  // items, one for each warp
inline constexpr int kMostNarrow = 4 * kNarrowPerWorker;
// A shared tile costs its sharers a state each, which fewer units do not pay for.
inline constexpr int32_t kMinSharedKeys = 2 * kUnitKeys;

// What a sequence shares: its first keys, and the states that a shared tile leaves for its rows.
struct Share {
  int32_t num_keys = 0;
  int32_t state_row = 0;
  int32_t num_states = 0;
  int32_t stride = 0;                         // rows between two states
  MaybeIndex wide_tile = MaybeIndex::none();  // that has them, by its number; none: a tile of another kind
  bool joins = false;                         // whether a tail may wait for them
};

// Who has a tile.
enum class Section { kDecode, kWide, kPrefill };

struct Tile {
  int32_t sequence;
  int32_t first_token;
  int32_t num_tokens;
  int32_t first_position;
  int32_t kv_begin;
  int32_t kv_end;
  const Share* share = nullptr;  // of a tail
  Share* sharers = nullptr;      // of a shared tile: the shares of its tokens' sequences, to be filled in
  Section section = Section::kDecode;
  MaybeIndex number = MaybeIndex::none();  // of a wide tile, from 0 on

  int32_t first_unit_key() const { return kv_begin / kUnitKeys * kUnitKeys; }
  int64_t units() const { return (kv_end - first_unit_key() + kUnitKeys - 1) / kUnitKeys; }
  bool leaves_state() const { return share != nullptr || sharers != nullptr; }
};

// A step on its way into a list.
struct Step {
  const WorkShape& shape;
  const WorkListLayout& layout;
  const BlockTableRows& batch;
  std::vector<SharedRun> runs{};
  std::vector<Share> shares{};  // [S], or none if there are no runs
  int64_t wide_units = 0;       // of the wide tiles that take the place of shared decode tiles, if they do
  int32_t wide_tokens = 0;      // of such a tile, at most
  int32_t most_decode = 0;      // queries of a sequence, that are decode tiles
};

// Decides who has decode tiles.
void divide_sequences(Step& step);
// Decides what is shared, and by which kind of tile. REQUIRES: divide_sequences(step)
void find_shares(Step& step);

bool is_decode(const Step& step, int32_t query_len);
Section reader_of(const Step& step, const SharedRun& run);
int32_t tile_tokens_of(const Step& step, Section section);

// Calls f(tile) for the tiles of one section: the shared ones, then the others in the order of the sequences.
template <class F>
void for_each_tile(Step& step, Section section, F&& f) {
  const BlockTableRows& batch = step.batch;
  const int32_t tile_tokens = tile_tokens_of(step, section);
  int32_t number = 0;
  for (const SharedRun& run : step.runs) {
    if (reader_of(step, run) != section) continue;
    for (int32_t done = 0; done < run.count; done += tile_tokens) {
      const int32_t s = run.first + done;
      f(Tile{s, batch.query_start[s], std::min(tile_tokens, run.count - done), run.num_keys, 0, run.num_keys,
             nullptr, &step.shares[s], section,
             section == Section::kWide ? MaybeIndex::of(number++) : MaybeIndex::none()});
    }
  }
  if (section == Section::kWide) return;
  const bool decode = section == Section::kDecode;
  for (int64_t s = 0; s < batch.num_sequences; ++s) {
    const int32_t query_len = batch.query_start[s + 1] - batch.query_start[s];
    const int32_t seq_len = batch.seq_lens[s];
    if (query_len == 0 || seq_len == 0 || is_decode(step, query_len) != decode) continue;
    const Share* share = step.shares.empty() || step.shares[s].num_keys == 0 ? nullptr : &step.shares[s];
    for (int32_t done = 0; done < query_len; done += tile_tokens) {
      const int32_t tokens = std::min(tile_tokens, query_len - done);
      const int32_t position = seq_len - query_len + done + (step.shape.causal ? 0 : kFarPosition);
      const int32_t kv_end = std::min(seq_len, position + tokens);
      int32_t kv_begin = step.shape.window > 0 ? std::max(0, position - step.shape.window + 1) : 0;
      if (share != nullptr) kv_begin = share->num_keys;
      f(Tile{static_cast<int32_t>(s), batch.query_start[s] + done, tokens, position, kv_begin, kv_end, share,
             nullptr, section});
    }
  }
}

}  // namespace bequest
