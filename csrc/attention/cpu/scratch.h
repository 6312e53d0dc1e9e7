// How one worker's memory is divided while it attends.
#pragma once

#include <cstdint>

#include "attention/cpu/plan.h"

namespace bequest {

// Rows of the register tile: the unit in which rows are scored, weighted and accumulated.
#if defined(__aarch64__)
inline constexpr int kRowBlock = 4;
#else
inline constexpr int kRowBlock = 6;
#endif
inline constexpr int kMaxLanes = 16;
inline constexpr int kScoredRows = 12;  // rows that are weighted together, in whole register tiles

// A softmax state per row: o [rows, padded_dim], m [rows], d [rows].
struct StateRows {
  float* o;
  float* m;
  float* d;

  StateRows(float* base, int64_t rows, int64_t padded_dim)
      : o(base), m(base + rows * padded_dim), d(m + rows) {}
};

struct AttentionScratch {
  float* keys;    // [D, kKeyTile], transposed
  float* values;  // [kKeyTile, padded_dim]
  float* q;       // [rows, D], scaled
  float* scores;  // [kScoredRows, kKeyTile]
  float* lane_d;  // [rows, kMaxLanes]: d of the running split, not yet summed over lanes
  float* split;   // StateRows of the running split
  float* total;   // StateRows of the splits before it

  AttentionScratch(float* base, int64_t rows, int64_t dim, int64_t padded_dim)
      : keys(base),
        values(keys + dim * kKeyTile),
        q(values + padded_dim * kKeyTile),
        scores(q + rows * dim),
        lane_d(scores + kScoredRows * kKeyTile),
        split(lane_d + rows * kMaxLanes),
        total(split + rows * (padded_dim + 2)) {}

  static int64_t floats(int64_t rows, int64_t dim, int64_t padded_dim) {
    return kKeyTile * (dim + padded_dim) + rows * dim + kScoredRows * kKeyTile + rows * kMaxLanes +
           2 * rows * (padded_dim + 2);
  }
};

}  // namespace bequest
