// Batch preparation: from tables and tokens to the arrays of a step, without a call per token.
#pragma once

#include <cstdint>
#include <span>

#include "cache/block_table.h"

namespace bequest {

// One sequence of a step: positions [computed, computed + scheduled) are computed.
struct BatchRow {
  const BlockTable* table;
  std::span<const int32_t> tokens;  // from position `computed` on, as many as are known
  int64_t computed;
  int64_t scheduled;
  int32_t last_row;  // sampler row that knows the token behind the end of `tokens`, or kNoRow
  const BlockTable* front = nullptr;  // of a beam: what is before its table. REQUIRES: not behind `computed`

  int64_t num_front() const { return front == nullptr ? 0 : front->num_rows(); }
};

// In BatchRow: no sampler row knows the next token. In a batch: the token is known.
inline constexpr int32_t kNoRow = -1;
// The token's keys and values are not written.
inline constexpr int64_t kNoSlot = -1;

// What a batch measures.
struct BatchShape {
  int64_t num_tokens;  // T
  int64_t num_rows;    // S
  int64_t columns;     // MB
  int64_t strips = 1;  // G
};

// Where a batch is written, with room for `shape`; e.g. pinned staging buffers of a captured graph.
struct BatchBuffers {
  BatchShape shape;
  int32_t* input_ids;     // [T]      token; 0 for one that only the device knows
  int32_t* input_rows;    // [T]      then the sampler row that drew it last, else kNoRow
  int32_t* positions;     // [T]
  int32_t* query_start;   // [S + 1]  row s has tokens [query_start[s], query_start[s + 1])
  int32_t* seq_lens;      // [S]      computed tokens after the step
  int64_t* slot_mapping;  // [G, T]   block * BS + slot in the block, or kNoSlot
  int32_t* block_tables;  // [G, S, MB]
};

// Checks the rows and returns the smallest shape that holds them.
BatchShape measure_batch(std::span<const BatchRow> rows);

// Fills every element. Room beyond the rows is padding: token 0 at position 0 in kNoSlot, rows of length 0,
// block 0. REQUIRES: buffers.shape is at least measure_batch(rows) in every dim
void write_batch(std::span<const BatchRow> rows, const BatchBuffers& buffers);

}  // namespace bequest
