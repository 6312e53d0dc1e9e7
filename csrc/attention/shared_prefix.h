// Which sequences of a step share their first blocks: beams, several answers to one prompt, children of one
// parent. Their common keys are then read once for all of them. Found from the block tables, so that it does
// not matter who made them share.
#pragma once

#include <cstdint>
#include <vector>

namespace bequest {

struct BlockTableRows {
  const int32_t* query_start;   // [S + 1]
  const int32_t* seq_lens;      // [S]
  const int32_t* block_tables;  // [S, MB]; null: nothing is known to be shared
  int64_t num_sequences;        // S
  int64_t max_blocks;           // MB
  int block_size;
};

// Sequences [first, first + count), count > 1, have keys [0, num_keys) in common.
struct SharedRun {
  int32_t first;
  int32_t count;
  int32_t num_keys;
};

// Runs of neighbours with one query each, in the order of the step, none in two runs; keys are shared in
// multiples of `unit`, and each sequence keeps some of its own. Of all ways to cut the step into runs the one
// that spares most keys.
std::vector<SharedRun> find_shared_runs(const BlockTableRows& rows, int unit);

}  // namespace bequest
