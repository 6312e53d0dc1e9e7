// Low-rank deltas of adapters: rows of a product get what their adapter adds, y += scale · B (A x).
//
// A row's bits depend on its own x and its own adapter alone: each sum has one order, whichever rows lie
// beside it and whoever runs it.
#pragma once

#include <cstdint>
#include <vector>

namespace bequest {

// What an adapter adds to some columns of a product: those of one matrix of a checkpoint.
struct LoraPart {
  const float* a;        // [R, K]
  const float* b;        // [R, C], the transpose of what checkpoints hold
  int64_t rank;          // R
  int64_t in_features;   // K
  int64_t first_column;  // of the product
  int64_t num_columns;   // C
  float scale;
};

// Rows that have the same adapter.
struct LoraRows {
  const std::vector<LoraPart>* parts;
  const int64_t* rows;
  int64_t num_rows;
};

struct LoraParams {
  const float* x;  // rows of K, x_stride apart; null: a row is 1 at one place and 0 elsewhere, as in `ids`
  float* y;        // rows of N, y_stride apart
  int64_t x_stride;
  int64_t y_stride;
  int64_t in_features;  // K
  const std::vector<LoraRows>& groups;
  const int32_t* ids = nullptr;  // of rows, in [0, K)
};

// REQUIRES: rows are rows of x and y, each in one group; columns of parts are columns of y; y overlaps
// nothing else.
void add_lora(const LoraParams& p);

// --- for lora.cpp and lora.simd.cpp

inline constexpr int64_t kLoraRows = 4;

// Rows that are computed together, which shares what is read of A and B.
struct LoraBlock {
  const LoraPart* part;
  const int64_t* rows;
  int64_t num_rows;  // 1 … kLoraRows
  float* inner;      // [num_rows, R]: scale · A x
};

struct LoraWork {
  const LoraParams& params;
  const LoraBlock* blocks;
  int64_t num_blocks;
  int64_t max_rank;
  int64_t max_columns;
};

}  // namespace bequest
