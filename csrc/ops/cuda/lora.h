// Low-rank deltas on the device: what the adapters of a step's rows add to a product. Adapters lie in slots,
// and which rows have which slot is data in device memory, so a graph serves every step of its size.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "device/stream.h"

namespace bequest::cuda {

inline constexpr int kMostLoraParts = 8;
inline constexpr int kLoraRows = 16;     // of a tile, at most
inline constexpr int kLoraRanks = 16;    // ranks are rounded up to a multiple, with zeros
inline constexpr int kLoraPiece = 1024;  // of A's depth
// Of one kernel, whose blocks tell each other what there is of a tile. More have a kernel for A and one for
// B.
inline constexpr int64_t kMostCountedTiles = 2048;

// What all slots hold for one product, whose matrix is P matrices of a checkpoint, one under the other. Of a
// layer's E experts a slot has E such products: `slots` is then what all slots have, and a tile's slot is
// slot * E + expert.
struct LoraSite {
  const void* a;                 // [slots, P, R, K] in `dtype`, as x and y are
  const void* b;                 // [slots, R / 16, N, 16]
  const int32_t* ranks;          // [slots, P], rounded up; 0: nothing is added to this part
  const float* scales;           // [slots, P]
  int32_t* counts;               // [kMostCountedTiles], zeros between launches
  int32_t ends[kMostLoraParts];  // [P]: the column behind each part
  int64_t num_slots;
  int64_t num_parts;     // P
  int64_t most_rank;     // R, a multiple of 16
  int64_t in_features;   // K
  int64_t out_features;  // N
  DType dtype;

  // Whether tensor cores multiply it: bfloat16 in even sizes. Else threads do, one sum each.
  bool has_tensor_cores() const {
    if (dtype != DType::kBF16 || in_features % 32 != 0) return false;
    for (int64_t part = 0; part < num_parts; ++part)
      if (ends[part] % 8 != 0) return false;
    return true;
  }
};

// Rows of a step, those of a slot side by side.
struct LoraTiles {
  const int32_t* rows;   // [at most T]
  const int32_t* tiles;  // [1 + most_tiles, 3]: how many there are, then of each: the first of its rows among
                         // these, their number, the slot, or -1: they have no adapter
  int64_t most_tiles;
  int64_t rows_of_x;  // so many rows of y follow each other that read the same row of x
  bool made_in_step;  // by lora_expert_tiles: they are not there yet when a step begins
};

// Pieces of A's depth, each summed apart.
constexpr int64_t lora_pieces(int64_t in_features) { return (in_features + kLoraPiece - 1) / kLoraPiece; }

struct LoraAddParams {
  const void* x;     // [T / rows_of_x, K]
  void* y;           // [T, N]
  float* shrunk;     // [pieces, T, P R]: what A leaves for B
  int64_t num_rows;  // T
  bool stores;       // y is what adapters add, and zeros in tiles of none; else it is added to
  LoraSite site;
  LoraTiles tiles;
};

// Each row of y gets scale · B (A x), summed in float32; the product with A is rounded to the dtype, and so
// is what tensor cores make of it. A row's bits do not depend on which others are there. Slots and tiles are
// read before the kernel ahead has ended, unless tiles are made in the step: they are there when a step
// begins.
// REQUIRES: the site has tensor cores, if it is stored.
void lora_add(const LoraAddParams& p, Stream stream);
// The same of rows that are shrunk already. x is not looked at.
void lora_expand(const LoraAddParams& p, Stream stream);

struct LoraExpertTilesParams {
  const int32_t* slots;  // [T] of each token's adapter, -1: none
  const int32_t* ids;    // [T, K]: its experts
  int64_t num_tokens;
  int64_t num_chosen;   // K
  int64_t num_experts;  // E
  int64_t num_slots;
  int32_t* places;  // [slots * E], for counting
  int32_t* rows;    // [T * K]: pairs t * K + k, those of a slot and an expert side by side
  int32_t* tiles;   // [1 + most_tiles, 3], as in LoraTiles
};

// The tiles of a layer with experts, by the choice that its router made. REQUIRES: most_tiles is at least
// T K / 16 + slots E, or T K.
void lora_expert_tiles(const LoraExpertTilesParams& p, Stream stream);

}  // namespace bequest::cuda
