// The splits of an item, one after another, for *.simd.cpp and *.amx.cpp files.
#pragma once

#include "attention/cpu/attend.h"
#include "core/half.h"

namespace bequest::BEQUEST_ISA {

// Calls attend_split(split, state), which leaves the state of a split there, for each of [split_begin,
// split_end). Where `partials` are wanted the states stay there, one after another. Otherwise they are merged
// in order, and their sum becomes the tile's rows of p.out; the tile has room for two states.
template <class Tile, class AttendSplit>
void walk_splits(const PagedAttentionParams& p, const AttendJob& job, const Tile& tile, int split_begin,
                 int split_end, float* partials, AttendSplit attend_split) {
  if (partials != nullptr) {
    const int64_t state_floats = int64_t{job.num_rows()} * (job.padded_dim + 2);
    for (int split = split_begin; split < split_end; ++split, partials += state_floats)
      attend_split(split, StateRows(partials, job.num_rows(), job.padded_dim));
    return;
  }
  if (split_begin < split_end)
    attend_split(split_begin, tile.total());  // merging with nothing would change no bit
  else
    clear_states(job, tile.total());
  for (int split = split_begin + 1; split < split_end; ++split) {
    attend_split(split, tile.split_state());
    merge_states(job, tile.total(), tile.split_state());
  }
  write_result(p, job, tile.total());
}

// Calls f.template operator()<T>() with the type of the cache's elements.
template <class F>
void with_cache_type(DType dtype, F f) {
  if (dtype == DType::kF32) return f.template operator()<float>();
  if (dtype == DType::kF8E4M3) return f.template operator()<Float8>();
  if (dtype == kF16) return f.template operator()<Float16>();
  f.template operator()<BFloat16>();
}

}  // namespace bequest::BEQUEST_ISA
