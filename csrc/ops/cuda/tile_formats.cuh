// Formats of weights as tile_linear.cuh reads them: 128 bytes of a row are a unit of k. A lane has two
// accesses of 16 bytes to each of its rows, and one to x for each 8 values that these hold.
//
// The order of k is free as long as W and x have the same. Which 16 bytes a lane takes is chosen so that the
// eight lanes which are served at once find W and x in different banks, where rows of 128 bytes have piece p
// of row r at p ^ (r % 8). Places are given as an exclusive or of what is the lane's and what is the access's.
#pragma once

#include "device/pairs.cuh"

namespace bequest::cuda {

// What all formats share: rows of W in the order of the lanes, and no groups.
struct WholeRows {
  static constexpr bool kGrouped = false;
  __device__ static int row(int group) { return group; }
  __device__ static constexpr int rows_line(int /*access*/) { return 0; }
};

struct TileBFloat16 : WholeRows {
  static constexpr int kUnit = 64;    // of k
  static constexpr int kVectors = 1;  // of 8 values of x, of an access
  __device__ static int piece(int quad) { return 2 * quad; }
  __device__ static constexpr int piece_of(int access) { return access; }
  __device__ static int line(int /*quad*/) { return 0; }  // of 64 of x
  __device__ static int x_piece(int quad) { return 2 * quad; }
  __device__ static constexpr int x_piece_of(int access, int /*vector*/) { return access; }
  __device__ static __forceinline__ void widen(const uint4& codes, int /*vector*/, uint32_t /*word*/,
                                               uint32_t (&pairs)[4]) {
    pairs[0] = codes.x, pairs[1] = codes.y, pairs[2] = codes.z, pairs[3] = codes.w;
  }
};

struct TileFloat8 : WholeRows {
  static constexpr int kUnit = 128;
  static constexpr int kVectors = 2;
  __device__ static int piece(int quad) { return 2 * quad ^ quad / 2; }
  __device__ static constexpr int piece_of(int access) { return access; }
  __device__ static int line(int quad) { return quad / 2; }
  __device__ static int x_piece(int quad) { return quad % 2 * 4 ^ quad / 2 * 2; }
  __device__ static constexpr int x_piece_of(int access, int vector) { return access * 2 + vector; }
  __device__ static __forceinline__ void widen(const uint4& codes, int vector, uint32_t /*word*/,
                                               uint32_t (&pairs)[4]) {
    fp8_to_bf16(vector == 0 ? codes.x : codes.z, pairs[0], pairs[1]);
    fp8_to_bf16(vector == 0 ? codes.y : codes.w, pairs[2], pairs[3]);
  }
};

// An access is of one group of 128. Lanes of the second half of a quad take their words in another order.
struct TileInt4 {
  static constexpr bool kGrouped = true;
  static constexpr int kUnit = 256;
  static constexpr int kVectors = 4;
  __device__ static int row(int group) { return group / 2 | group % 2 << 2; }
  __device__ static int piece(int quad) { return quad; }
  __device__ static constexpr int piece_of(int access) { return access * 4; }
  __device__ static int line(int quad) { return quad / 2; }
  __device__ static constexpr int rows_line(int access) { return access * 2; }
  __device__ static int x_piece(int quad) { return quad % 2 * 4 ^ quad / 2 * 2; }
  __device__ static constexpr int x_piece_of(int /*access*/, int vector) { return vector; }

  __device__ static __forceinline__ float scale(uint32_t word) {
    return __uint_as_float(word & 0xffffff00u);
  }
  // Codes as the last bits of 128 are bfloat16 at once.
  __device__ static __forceinline__ void widen(const uint4& codes, int vector, uint32_t word,
                                               uint32_t (&pairs)[4]) {
    const bool swapped = threadIdx.x % 4 >= 2;
    const uint32_t first = vector % 2 == 0 ? codes.x : codes.y, second = vector % 2 == 0 ? codes.z : codes.w;
    const uint32_t eight = swapped == (vector < 2) ? second : first;
    const uint32_t offset = (0x4300u + (word & 0xff)) * 0x10001u;  // 128 + zero, twice
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t pair;
      asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(pair) : "r"(eight >> (4 * i)));
      asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(pairs[i]) : "r"(pair), "r"(offset));
    }
  }
};

}  // namespace bequest::cuda
