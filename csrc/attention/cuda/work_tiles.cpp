#include "attention/cuda/work_tiles.h"

#include "attention/cuda/few_queries.h"

namespace bequest {
namespace {

// Where workers have fewer units each, what they wait for is not bytes: sharing would only add states.
constexpr int64_t kLeastShare = 4;
constexpr int64_t kLeastWideShare = 2;  // the same where the units of all runs are wide tiles
constexpr int32_t kLeastWideRows = 64;  // of a wide tile
// From so many units each on, reading shared keys again for every 16 rows costs more than a kernel of its
// own.
constexpr int64_t kPrefillShare = 8;
// The same of the keys of sequences with a few queries: these fill less of a prefill tile.
constexpr int64_t kFewShare = 16;

// Whether a run's keys are read by prefill tiles.
bool is_for_prefill(const Step& step, const SharedRun& run) {
  const WorkListLayout& layout = step.layout;
  if (layout.prefill_tokens == 0 || run.count * step.shape.group() <= kDecodeRows) return false;
  const int64_t tiles = (run.count + layout.decode_tokens - 1) / layout.decode_tokens;
  return layout.decode_tokens < 2 || tiles * (run.num_keys / kUnitKeys) >= kPrefillShare * layout.workers;
}

// Units of wide tiles of so many tokens if all runs that are not for prefill had them; 0: one has no more
// rows than a decode tile.
int64_t num_wide_units(const Step& step, int32_t tile_tokens) {
  int64_t units = 0;
  for (const SharedRun& run : step.runs) {
    if (is_for_prefill(step, run)) continue;
    if (run.count * step.shape.group() <= kDecodeRows) return 0;
    units += (run.count + tile_tokens - 1) / tile_tokens * (run.num_keys / kUnitKeys);
  }
  return units;
}

int64_t num_decode_units(const Step& step) {
  int64_t keys = 0;
  for (int64_t s = 0; s < step.batch.num_sequences; ++s)
    if (is_decode(step, step.batch.query_start[s + 1] - step.batch.query_start[s]))
      keys += step.batch.seq_lens[s];
  return keys / kUnitKeys;
}

// Tiles of half the rows take half the time, if there is a worker for each, and a warp for each tail.
void choose_wide_tiles(Step& step) {
  const int32_t rows = prefill_tile_rows(step.shape.head_dim);
  const int64_t most = step.layout.wide_workers;
  step.wide_tokens = kLeastWideRows / step.shape.group();
  step.wide_units = step.wide_tokens > 0 ? num_wide_units(step, step.wide_tokens) : 0;
  const int64_t tails = kNarrowPerWorker * (step.layout.workers - step.wide_units);
  if (step.wide_units <= most && step.batch.num_sequences <= tails) return;
  step.wide_tokens = rows / step.shape.group();
  step.wide_units = num_wide_units(step, step.wide_tokens);
  if (step.wide_units > kWideUnits * most) step.wide_units = 0;
}

}  // namespace

void divide_sequences(Step& step) {
  const BlockTableRows& batch = step.batch;
  const int32_t one_tile = step.layout.decode_tokens;
  step.most_decode = few_tokens(one_tile);
  if (one_tile == 0 || batch.num_sequences == 0) return;
  if (batch.query_start[batch.num_sequences] <= step.most_decode) return;
  int64_t keys_again = 0;  // that decode tiles read beside those that a prefill tile would
  for (int64_t s = 0; s < batch.num_sequences; ++s) {
    const int32_t query_len = batch.query_start[s + 1] - batch.query_start[s];
    const int32_t window = step.shape.window > 0 ? step.shape.window + query_len : batch.seq_lens[s];
    if (query_len <= step.most_decode)
      keys_again += int64_t{(query_len - 1) / one_tile} * std::min(batch.seq_lens[s], window);
  }
  if (keys_again >= kFewShare * step.layout.workers * kUnitKeys) step.most_decode = one_tile;
}

bool is_decode(const Step& step, int32_t query_len) {
  return step.shape.dtype == DType::kF32 || query_len <= step.most_decode;
}

Section reader_of(const Step& step, const SharedRun& run) {
  if (is_for_prefill(step, run)) return Section::kPrefill;
  return step.wide_units > 0 ? Section::kWide : Section::kDecode;
}

int32_t tile_tokens_of(const Step& step, Section section) {
  if (section == Section::kWide) return step.wide_tokens;
  return section == Section::kDecode ? step.layout.decode_tokens : step.layout.prefill_tokens;
}

void find_shares(Step& step) {
  if (step.shape.dtype == DType::kF32 || !step.shape.causal || step.shape.window > 0) return;
  const int64_t num_units = step.layout.decode_tokens == 0 ? 0 : num_decode_units(step);
  const int workers = step.layout.workers;
  if (num_units < std::min(kLeastShare, kLeastWideShare) * workers) return;
  step.runs = find_shared_runs(step.batch, kUnitKeys);
  std::erase_if(step.runs, [&](const SharedRun& run) {
    return run.num_keys < kMinSharedKeys || (step.layout.decode_tokens < 2 && !is_for_prefill(step, run));
  });
  if (step.shape.wide_tiles) choose_wide_tiles(step);
  if (num_units < kLeastShare * workers && step.wide_units == 0) step.runs.clear();
  if (step.runs.empty()) return;
  step.shares.resize(step.batch.num_sequences);
  for (const SharedRun& run : step.runs)
    for (int32_t i = 0; i < run.count; ++i) step.shares[run.first + i].num_keys = run.num_keys;
}

}  // namespace bequest
