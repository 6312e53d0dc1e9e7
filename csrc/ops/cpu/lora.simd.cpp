// Two passes: A x of every block of rows, then B of that. Each is cut into pieces of one block and a few
// ranks or columns, so that one row of a large model has work for all threads, and many rows of a small one
// are few pieces.
#include "ops/cpu/lora.h"

#include "core/simd.h"
#include "core/threads.h"

namespace bequest::BEQUEST_ISA {
namespace {

constexpr int64_t kRanks = 4;            // dot products that share what is read of x
constexpr int64_t kColumns = 256;        // of a piece of the second pass
constexpr int64_t kPieceWork = 1 << 15;  // multiply-adds that are worth waking a thread for

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

float sum_of(VecF v) {
  float sum = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) sum += v[lane];
  return sum;
}

// Ranks [first, first + Ranks) of `Rows` rows. A sum is one chain of vectors, then its lanes, then the rest.
template <int Rows, int Ranks>
void reduce(const LoraParams& p, const LoraBlock& block, int64_t first) {
  const LoraPart& part = *block.part;
  const float* x[Rows];
  for (int row = 0; row < Rows; ++row) x[row] = p.x + block.rows[row] * p.x_stride;
  const float* const a = part.a + first * p.in_features;
  VecF sums[Rows][Ranks] = {};
  int64_t k = 0;
  for (; k + kLanes <= p.in_features; k += kLanes)
    for (int rank = 0; rank < Ranks; ++rank) {
      const VecF weights = load(a + rank * p.in_features + k);
      for (int row = 0; row < Rows; ++row) sums[row][rank] = load(x[row] + k) * weights + sums[row][rank];
    }
  for (int row = 0; row < Rows; ++row)
    for (int rank = 0; rank < Ranks; ++rank) {
      float sum = sum_of(sums[row][rank]);
      for (int64_t i = k; i < p.in_features; ++i) sum += x[row][i] * a[rank * p.in_features + i];
      block.inner[row * part.rank + first + rank] = sum * part.scale;
    }
}

// Columns [begin, end) of a part, for `Rows` rows: the sum over ranks in their order, then added to y.
template <int Rows>
void expand(const LoraParams& p, const LoraBlock& block, int64_t begin, int64_t end) {
  const LoraPart& part = *block.part;
  float* y[Rows];
  for (int row = 0; row < Rows; ++row) y[row] = p.y + block.rows[row] * p.y_stride + part.first_column;
  int64_t column = begin;
  for (; column + kLanes <= end; column += kLanes) {
    VecF sums[Rows] = {};
    for (int64_t rank = 0; rank < part.rank; ++rank) {
      const VecF weights = load(part.b + rank * part.num_columns + column);
      for (int row = 0; row < Rows; ++row)
        sums[row] = weights * block.inner[row * part.rank + rank] + sums[row];
    }
    for (int row = 0; row < Rows; ++row) store(y[row] + column, load(y[row] + column) + sums[row]);
  }
  for (; column < end; ++column)
    for (int row = 0; row < Rows; ++row) {
      float sum = 0.0f;
      for (int64_t rank = 0; rank < part.rank; ++rank)
        sum = part.b[rank * part.num_columns + column] * block.inner[row * part.rank + rank] + sum;
      y[row][column] += sum;
    }
}

// A row that is 1 at one place: its products are a column of A.
void pick(const LoraParams& p, const LoraBlock& block, int64_t first) {
  const LoraPart& part = *block.part;
  for (int64_t row = 0; row < block.num_rows; ++row)
    for (int64_t rank = first; rank < smaller(first + kRanks, part.rank); ++rank)
      block.inner[row * part.rank + rank] =
          part.a[rank * part.in_features + p.ids[block.rows[row]]] * part.scale;
}

template <int Rows>
void reduce_ranks(const LoraParams& p, const LoraBlock& block, int64_t first) {
  if (p.x == nullptr) return pick(p, block, first);
  if (first + kRanks <= block.part->rank) return reduce<Rows, kRanks>(p, block, first);
  for (; first < block.part->rank; ++first) reduce<Rows, 1>(p, block, first);
}

// f of the number of rows, as a constant.
template <class F>
void with_rows(const LoraBlock& block, F f) {
  switch (block.num_rows) {
    case 1:
      return f.template operator()<1>();
    case 2:
      return f.template operator()<2>();
    case 3:
      return f.template operator()<3>();
    default:
      return f.template operator()<4>();
  }
}

int64_t grain(int64_t work_of_piece) { return 1 + kPieceWork / (1 + work_of_piece); }

}  // namespace

void add_lora(const LoraWork& work) {
  const LoraParams& p = work.params;
  const int64_t rank_pieces = (work.max_rank + kRanks - 1) / kRanks;
  parallel_for(work.num_blocks * rank_pieces, grain(kLoraRows * kRanks * p.in_features),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   const LoraBlock& block = work.blocks[i / rank_pieces];
                   const int64_t first = i % rank_pieces * kRanks;
                   if (first >= block.part->rank) continue;
                   with_rows(block, [&]<int Rows>() { reduce_ranks<Rows>(p, block, first); });
                 }
               });
  const int64_t column_pieces = (work.max_columns + kColumns - 1) / kColumns;
  parallel_for(work.num_blocks * column_pieces, grain(kLoraRows * kColumns * work.max_rank),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   const LoraBlock& block = work.blocks[i / column_pieces];
                   const int64_t first = i % column_pieces * kColumns;
                   const int64_t last = smaller(first + kColumns, block.part->num_columns);
                   if (first >= last) continue;
                   with_rows(block, [&]<int Rows>() { expand<Rows>(p, block, first, last); });
                 }
               });
}

}  // namespace bequest::BEQUEST_ISA
