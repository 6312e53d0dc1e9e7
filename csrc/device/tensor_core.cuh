// The instructions bf16 attention is made of, and the layout of its shared-memory tiles.
//
// A tile is rows of D bf16, each row D / 8 chunks of 16 bytes; chunk c of row r lies at chunk c ^ (r % 8).
// ldmatrix reads one logical chunk of 8 consecutive rows at a time, which so falls into 8 different groups of
// 4 banks.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace bequest {

using bf16 = __nv_bfloat16;

__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies 16 bytes to shared memory, or zeros if !valid (the source is then not read). No prefetch hint:
// fetching 256 bytes ahead into L2 cost 5 % of the bandwidth.
__device__ inline void copy_16_async(uint32_t destination, const void* source, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes)
               : "memory");
}

// The same for what is read once: its lines leave L2 before all others.
__device__ inline uint64_t read_once_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline void copy_16_once_async(uint32_t destination, const void* source, bool valid,
                                          uint64_t policy) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(destination),
               "l"(source), "r"(bytes), "l"(policy)
               : "memory");
}
__device__ inline void copy_4_async(uint32_t destination, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(destination), "l"(source) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8 × 8 matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// A lane's 8 or 16 bytes.
__device__ inline void load_8(uint32_t (&r)[2], uint32_t address) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(address) : "memory");
}
__device__ inline void load_16(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ inline void store_16(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]),
               "r"(r[3])
               : "memory");
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

__device__ inline uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
// Beyond 65504 they stay there; NaN stays NaN.
__device__ inline uint32_t pack_f16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// A pair of bf16 as float16: exact for magnitudes from 2^-14 to 65504.
__device__ inline uint32_t bf16_to_f16(uint32_t pair) {
  return pack_f16(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Four e4m3 → two pairs of float16, exactly. One instruction per pair.
__device__ inline void fp8_to_f16(uint32_t four, uint32_t& low, uint32_t& high) {
  asm("{\n"
      ".reg .b16 first, second;\n"
      "mov.b32 {first, second}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, first;\n"
      "cvt.rn.f16x2.e4m3x2 %1, second;\n"
      "}"
      : "=r"(low), "=r"(high)
      : "r"(four));
}

// The same as bf16, exactly too.
__device__ inline void fp8_to_bf16(uint32_t four, uint32_t& low, uint32_t& high) {
  const auto convert = [](uint32_t pair) {
    const float2 both = __half22float2(reinterpret_cast<const __half2&>(pair));
    return pack(both.x, both.y);
  };
  fp8_to_f16(four, low, high);
  low = convert(low);
  high = convert(high);
}

// Over the four lanes that hold one row of c.
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
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

}  // namespace bequest
