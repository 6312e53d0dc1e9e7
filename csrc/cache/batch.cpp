#include "cache/batch.h"

#include <algorithm>
#include <numeric>

#include "core/check.h"

namespace bequest {

namespace {

int64_t blocks_used(const BatchRow& row) {
  const int64_t bs = row.table->pool().block_size();
  return (row.computed + row.scheduled + bs - 1) / bs;
}

void check_row(const BatchRow& row) {
  check(row.computed >= 0 && row.scheduled >= 0, "computed and scheduled tokens are counts");
  const int64_t end = row.computed + row.scheduled;
  check(end <= INT32_MAX, "a sequence is too long");
  check(row.table->resident(), "a table that was swapped out cannot be scheduled");
  const int64_t rows = row.num_front() + row.table->num_rows();
  check(end <= rows * row.table->pool().block_size(), "a scheduled token has no block");
  const int64_t known = row.computed + static_cast<int64_t>(row.tokens.size());
  check(end - known <= 1, "more than one scheduled token is unknown");
  check(end <= known || row.last_row != kNoRow, "a scheduled token is unknown and no sampler row has it");
}

void write_tokens(const BatchRow& row, int32_t* input_ids, int32_t* input_rows) {
  const int64_t known = std::min<int64_t>(row.tokens.size(), row.scheduled);
  std::copy_n(row.tokens.data(), known, input_ids);
  std::fill_n(input_ids + known, row.scheduled - known, 0);
  std::fill_n(input_rows, known, kNoRow);
  std::fill_n(input_rows + known, row.scheduled - known, row.last_row);
}

// One run of consecutive slots per block.
void write_slots(const BatchRow& row, int64_t strip, int64_t* slots) {
  const int64_t bs = row.table->pool().block_size(), strips = row.table->num_strips();
  const int64_t end = row.computed + row.scheduled;
  for (int64_t position = row.computed; position < end;) {
    const int64_t run = std::min(end, (position / bs + 1) * bs) - position;
    const int64_t block = row.table->entries()[(position / bs - row.num_front()) * strips + strip];
    std::iota(slots, slots + run, block * bs + position % bs);
    slots += run;
    position += run;
  }
}

int32_t* write_blocks(const BlockTable& table, int64_t strip, int64_t count, int32_t* blocks) {
  const int64_t strips = table.num_strips();
  const int32_t* entries = table.entries().data() + strip;
  if (strips == 1) return std::copy_n(entries, count, blocks);
  for (int64_t i = 0; i < count; ++i) blocks[i] = entries[i * strips];
  return blocks + count;
}

void write_blocks(const BatchRow& row, int64_t strip, int64_t columns, int32_t* blocks) {
  int32_t* const end = blocks + columns;
  const int64_t before = row.num_front();
  if (row.front != nullptr) blocks = write_blocks(*row.front, strip, before, blocks);
  blocks = write_blocks(*row.table, strip, blocks_used(row) - before, blocks);
  std::fill(blocks, end, kNullBlock);
}

}  // namespace

BatchShape measure_batch(std::span<const BatchRow> rows) {
  BatchShape shape{0, static_cast<int64_t>(rows.size()), 0};
  if (!rows.empty()) shape.strips = rows[0].table->num_strips();
  for (const BatchRow& row : rows) {
    check_row(row);
    check(row.table->num_strips() == shape.strips, "tables of one step are of one cache");
    shape.num_tokens += row.scheduled;
    shape.columns = std::max(shape.columns, blocks_used(row));
  }
  check(shape.num_tokens <= INT32_MAX, "a step has too many tokens");
  return shape;
}

void write_batch(std::span<const BatchRow> rows, const BatchBuffers& out) {
  const BatchShape least = measure_batch(rows);
  check(least.num_tokens <= out.shape.num_tokens, "the buffers hold too few tokens");
  check(least.num_rows <= out.shape.num_rows, "the buffers hold too few rows");
  check(least.columns <= out.shape.columns, "a sequence has more blocks than the block tables have columns");
  check(rows.empty() || least.strips == out.shape.strips, "the buffers are of another cache");

  const int64_t strips = out.shape.strips;
  int64_t t = 0, s = 0;
  for (const BatchRow& row : rows) {
    out.query_start[s] = static_cast<int32_t>(t);
    out.seq_lens[s] = static_cast<int32_t>(row.computed + row.scheduled);
    write_tokens(row, out.input_ids + t, out.input_rows + t);
    std::iota(out.positions + t, out.positions + t + row.scheduled, static_cast<int32_t>(row.computed));
    for (int64_t g = 0; g < strips; ++g) {
      write_slots(row, g, out.slot_mapping + g * out.shape.num_tokens + t);
      write_blocks(row, g, out.shape.columns,
                   out.block_tables + (g * out.shape.num_rows + s) * out.shape.columns);
    }
    t += row.scheduled;
    ++s;
  }

  const int64_t pad_tokens = out.shape.num_tokens - t;
  const int64_t pad_rows = out.shape.num_rows - s;
  std::fill_n(out.input_ids + t, pad_tokens, 0);
  std::fill_n(out.input_rows + t, pad_tokens, kNoRow);
  std::fill_n(out.positions + t, pad_tokens, 0);
  for (int64_t g = 0; g < strips; ++g) {
    std::fill_n(out.slot_mapping + g * out.shape.num_tokens + t, pad_tokens, kNoSlot);
    std::fill_n(out.block_tables + (g * out.shape.num_rows + s) * out.shape.columns,
                pad_rows * out.shape.columns, kNullBlock);
  }
  std::fill_n(out.query_start + s, pad_rows + 1, static_cast<int32_t>(t));
  std::fill_n(out.seq_lens + s, pad_rows, 0);
}

}  // namespace bequest
