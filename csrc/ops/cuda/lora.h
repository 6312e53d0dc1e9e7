// Low-rank deltas on the device: what the adapters of a step's rows add to a product. Adapters lie in slots,
// and which rows have which slot is data in device memory, so a graph serves every step of its size.
#pragma once

#include <cstdint>

#include "device/stream.h"

namespace bequest::cuda {

inline constexpr int kMostLoraParts = 8;
inline constexpr int kLoraRows = 16;     // of a tile, at most
inline constexpr int kLoraRanks = 16;    // ranks are rounded up to a multiple, with zeros
inline constexpr int kLoraPiece = 1024;  // of A's depth

// What all slots hold for one product, whose matrix is P matrices of a checkpoint, one under the other.
struct LoraSite {
  const void* a;                 // [slots, P, R, K] bfloat16
  const void* b;                 // [slots, R / 16, N, 16] bfloat16
  const int32_t* ranks;          // [slots, P], rounded up; 0: nothing is added to this part
  const float* scales;           // [slots, P]
  int32_t ends[kMostLoraParts];  // [P]: the column behind each part, a multiple of 8
  int64_t num_slots;
  int64_t num_parts;     // P
  int64_t most_rank;     // R, a multiple of 16
  int64_t in_features;   // K, a multiple of 32
  int64_t out_features;  // N, a multiple of 8
};

// Rows of a step that have adapters, those of a slot side by side.
struct LoraTiles {
  const int32_t* rows;   // [at most T]
  const int32_t* tiles;  // [1 + most_tiles, 3]: how many there are, then of each: the first of its rows among
                         // these, their number, the slot
  int64_t most_tiles;
};

// Pieces of A's depth, each summed apart.
constexpr int64_t lora_pieces(int64_t in_features) { return (in_features + kLoraPiece - 1) / kLoraPiece; }

struct LoraShrinkParams {
  const void* x;     // [T, K] bfloat16
  float* shrunk;     // [pieces, T, P R]
  int64_t num_rows;  // T
  LoraSite site;
  LoraTiles tiles;
};

struct LoraExpandParams {
  void* y;              // [T, N] bfloat16, added to
  const float* shrunk;  // what lora_shrink has left
  int64_t num_rows;     // T
  LoraSite site;
  LoraTiles tiles;
};

// Each row of y gets scale · B (A x), summed in float32; the product with A is rounded to bfloat16. A row's
// bits do not depend on which others are there. Slots and tiles are read before the kernel ahead has ended:
// they are there when a step begins.
void lora_shrink(const LoraShrinkParams& p, Stream stream);
void lora_expand(const LoraExpandParams& p, Stream stream);

}  // namespace bequest::cuda
