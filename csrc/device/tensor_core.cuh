// Matrix products of single warps (mma.sync), and the layout of the tiles in shared memory that they read.
//
// A tile is rows of D bf16, each row D / 8 chunks of 16 bytes; chunk c of row r lies at chunk c ^ (r % 8).
// ldmatrix reads one logical chunk of 8 consecutive rows at a time, which so falls into 8 different groups of
// 4 banks.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace bequest::cuda {

// Four 8 × 8 matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
// The way back.
__device__ inline void store_matrices(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// The transpose of an 8 × 8 matrix in registers: lane l has of row l / 4 the columns l % 4 * 2 + {0, 1}.
__device__ inline uint32_t transposed(uint32_t pair) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

// c[16, 8] += a[16, 16] · b[16, 8]. Lane l holds rows l / 4 and l / 4 + 8, columns l % 4 * 2 + {0, 1} of c.
__device__ inline void multiply_accumulate(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same of float16 operands.
__device__ inline void multiply_accumulate_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c[16, 8] += a[16, 32] · b[32, 8] of bytes, a without and b with signs, exactly. Lane l holds of c what it
// does above.
__device__ inline void multiply_accumulate_bytes(int (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, "
      "%1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Byte offset of 16-byte chunk `chunk` of row `row` in a tile.
template <int D>
__device__ inline uint32_t tile_offset(int row, int chunk) {
  return row * (D * 2) + ((chunk ^ (row & 7)) << 4);
}

// Lane addresses for load_matrices on a tile. With rows 0-15 and chunks {0, 1} of the tile, the matrices come
// as
//   by rows first:    (rows 0-7, chunk 0) (rows 8-15, chunk 0) (rows 0-7, chunk 1) (rows 8-15, chunk 1)
//   by columns first: (rows 0-7, chunk 0) (rows 0-7, chunk 1) (rows 8-15, chunk 0) (rows 8-15, chunk 1)
// Chunks {2i, 2i + 1} are at address ^ (32 * i), rows 16j.. at address + 16 * j * row bytes: tiles are
// aligned so that neither carries into the other.
template <int D>
__device__ inline uint32_t lane_offset_rows_first(int lane) {
  return tile_offset<D>((lane >> 3 & 1) * 8 + (lane & 7), lane >> 4);
}
template <int D>
__device__ inline uint32_t lane_offset_columns_first(int lane) {
  return tile_offset<D>((lane >> 4) * 8 + (lane & 7), lane >> 3 & 1);
}

}  // namespace bequest::cuda
