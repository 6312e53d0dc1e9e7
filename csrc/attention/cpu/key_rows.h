// Which keys a query sees and where they lie, for *.simd.cpp and *.amx.cpp files.
#pragma once

#include "attention/cpu/attend.h"
#include "core/simd.h"

namespace bequest::BEQUEST_ISA {

// Half-open range of keys; relative to a tile where said.
struct KeyRange {
  int begin;
  int end;
};

inline KeyRange intersect(KeyRange a, KeyRange b) {
  return {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
}

// What the query token `t` of the tile sees, in absolute positions.
inline KeyRange visible(const AttendJob& job, int t) {
  const QueryTile& tile = *job.tile;
  if (!job.shape->causal) return {0, tile.seq_len};
  const int end = tile.first_position + t + 1;
  const int window = job.shape->window;
  return {window > 0 && end > window ? end - window : 0, end};
}

// Addresses of the keys of one tile; a key's value lies `values_after_keys` elements further.
template <class T>
struct KeyRows {
  const T* at[kKeyTile];

  // Keys outside `keys` (absolute) are never seen; they get a neighbour's address, so that packing needs no
  // mask and touches nothing that was not written.
  void find(const PagedAttentionParams& p, const AttendJob& job, int tile_begin, KeyRange keys) {
    const T* base = static_cast<const T*>(p.kv_cache) + p.layout.keys(p.layer, job.head);
    const int block_size = job.shape->block_size;
    const int64_t dim = p.layout.head_dim;
    int block = keys.begin / block_size;
    int offset = keys.begin % block_size;
    for (int position = keys.begin; position < keys.end; ++block, offset = 0) {
      const T* row = base + job.blocks[block] * p.layout.block_stride() + offset * dim;
      const int left = keys.end - position, here = block_size - offset;
      const int end = position + (left < here ? left : here);
      for (; position < end; ++position, row += dim) at[position - tile_begin] = row;
    }
    for (int j = 0; j < keys.begin - tile_begin; ++j) at[j] = at[keys.begin - tile_begin];
    for (int j = keys.end - tile_begin; j < kKeyTile; ++j) at[j] = at[keys.end - 1 - tile_begin];
  }
};

// Blocks lie anywhere, so the chip cannot guess the next one: each read asks for what the next tile will read
// at the same place.
template <class T>
inline void fetch_ahead(const T* address) {
#if defined(BEQUEST_ISA_neon)
  // GCC 12 takes an inlined lambda that only prefetches for one that does nothing.
  asm volatile("prfm pldl2keep, %0" : : "m"(*reinterpret_cast<const char*>(address)));
#else
  __builtin_prefetch(address, 0, 2);
#endif
}

// The same for row[d], where every vector of a row is asked for in turn.
template <class T>
inline void fetch_ahead(const T* row, int d) {
#if defined(BEQUEST_ISA_neon)
  if (d * sizeof(T) % 64 != 0) return;  // a line holds several vectors
#endif
  fetch_ahead(row + d);
}

// bias[i] = table[clamp(from + i, 0, last)]
inline VecF bias_from(const float* table, int from, int last) {
  if (from >= 0 && from + kLanes - 1 <= last) return load(table + from);
  const VecF edge = broadcast(table[from < 0 ? 0 : last]);
  if (from + kLanes - 1 <= 0 || from >= last) return edge;
#if defined(BEQUEST_ISA_avx512)
  if (from >= 0 || from + kLanes - 1 <= last) {  // over one edge: the lanes behind it are not read
    const uint32_t inside = from < 0 ? 0xffffu << -from : 0xffffu >> (from + kLanes - 1 - last);
    return (VecF)_mm512_mask_loadu_ps(edge, static_cast<__mmask16>(inside), table + from);
  }
#endif
  VecF bias;
  for (int i = 0; i < kLanes; ++i) {
    const int at = from + i;
    bias[i] = table[at < 0 ? 0 : at > last ? last : at];
  }
  return bias;
}

}  // namespace bequest::BEQUEST_ISA
