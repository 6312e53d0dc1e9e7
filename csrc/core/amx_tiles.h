// The matrix units of x86-64, for *.amx.cpp files: eight tiles of up to 16 rows × 64 bytes per thread, and
// one product,
//
//   c [M, N] float32 += a [M, 2 P] bfloat16 · b [P, 2 N] bfloat16
//
// where row p of b holds the pairs (k = 2 p, 2 p + 1) of all N columns: b[p][2 n + i] multiplies a[m][2 p +
// i]. In full tiles M = N = P = 16, so one product takes 32 values of k.
//
// The unit sums the even and the odd k of a product apart, each in order, then adds both to c; subnormal
// numbers count as zero. A row of c depends on its own row of a and on b alone, whatever M is, so rows keep
// their bits in any batch.
//
// Tiles are state of a thread that other libraries configure too (oneDNN does): a kernel makes a TileScope in
// each thread, where its work item begins, and calls nobody else before the scope ends.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "core/dtype.h"

namespace bequest::amx {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileRowBytes = 64;
constexpr int64_t kTileBytes = kTileRows * kTileRowBytes;

// The sizes of the eight tiles, as the instruction reads them. Full ones unless said otherwise.
struct alignas(64) TileSizes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileSizes) == 64);

class TileScope {
 public:
  explicit TileScope(const TileSizes& sizes) { _tile_loadconfig(&sizes); }
  ~TileScope() { _tile_release(); }  // a thread without tiles is cheaper to switch
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

// GCC's intrinsics want the number of a tile spelled out, which no template can do, and do not say what
// memory they read.
template <int Tile>
[[gnu::always_inline]] inline void load_tile(const void* rows,
                                             int64_t stride) {  // stride: bytes between rows
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(Tile) : "memory");
}

template <int Tile>
[[gnu::always_inline]] inline void store_tile(void* rows, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(stride), "i"(Tile) : "memory");
}

template <int Tile>
[[gnu::always_inline]] inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
}

// c += a · b
template <int C, int A, int B>
[[gnu::always_inline]] inline void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// Two vectors of float32 as bfloat16, to nearest even; `low` comes first. Subnormal numbers become zero.
[[gnu::always_inline]] inline __m512i round_to_bfloat16(__m512 low, __m512 high) {
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

}  // namespace
}  // namespace bequest::amx
