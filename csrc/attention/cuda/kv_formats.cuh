// What the cache may hold beside queries in bf16, and how operands are made of it.
//
// fp8 is exact in float16, and one instruction makes a pair of it, so everything is multiplied as float16
// there: the queries, which are rounded to it (their bf16 has fewer bits, but a larger range), and the
// softmax weights.
#pragma once

#include "attention/cuda/mailbox.cuh"
#include "device/exchange.cuh"
#include "device/pairs.cuh"
#include "device/shared_memory.cuh"
#include "device/tensor_core.cuh"
#include "device/warpgroup.cuh"

namespace bequest::cuda {

struct Bf16Cache {
  using Element = bf16;
  using Operands = Bf16Operands;

  __device__ static void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    multiply_accumulate(c, a, b0, b1);
  }
  __device__ static uint32_t pack_weights(float low, float high) { return pack(low, high); }
};

struct Fp8Cache {
  using Element = uint8_t;
  using Operands = F16Operands;

  __device__ static void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    multiply_accumulate_f16(c, a, b0, b1);
  }
  __device__ static uint32_t pack_weights(float low, float high) { return pack_f16(low, high); }
};

// A warp's step of the decode kernel: kKeys keys in rows of kRowBytes at `tile`, their values in another
// tile, and what a lane (g = lane / 4, t = lane % 4) has of queries [16, D] and of the result. A step of
// either format has the bytes of a 16 × D float tile.
template <int D, class Cache>
struct DecodeStep;

template <int D>
struct DecodeStep<D, Bf16Cache> {
  static constexpr int kKeys = 16;
  static constexpr int kRowBytes = D * 2;

  __device__ static uint32_t offset(int row, int chunk) { return tile_offset<D>(row, chunk); }

  // Rows g and g + 8 (half 0 and 1) of the queries, zeros for null.
  __device__ static void read_query(uint32_t (&q)[D / 16][4], int half, const bf16* row, int lane) {
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        q[k][half + 2 * i] =
            row ? *reinterpret_cast<const uint32_t*>(row + k * 16 + i * 8 + lane % 4 * 2) : 0;
  }

  __device__ static void multiply_keys(float (&scores)[kKeys / 8][4], const uint32_t (&q)[D / 16][4],
                                       uint32_t tile, int lane) {
    const uint32_t keys = tile + lane_offset_columns_first<D>(lane);
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      uint32_t b[4];
      load_matrices(b, keys ^ (k * 32));
      multiply_accumulate(scores[0], q[k], b[0], b[1]);
      multiply_accumulate(scores[1], q[k], b[2], b[3]);
    }
  }

  __device__ static void multiply_values(float (&o)[D / 8][4], const float (&p)[kKeys / 8][4], uint32_t tile,
                                         int lane) {
    const uint32_t weights[4] = {pack(p[0][0], p[0][1]), pack(p[0][2], p[0][3]), pack(p[1][0], p[1][1]),
                                 pack(p[1][2], p[1][3])};
    const uint32_t values = tile + lane_offset_rows_first<D>(lane);
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
      uint32_t b[4];
      load_matrices_transposed(b, values ^ (n * 32));
      multiply_accumulate(o[2 * n], weights, b[0], b[1]);
      multiply_accumulate(o[2 * n + 1], weights, b[2], b[3]);
    }
  }

  // Row g + 8 * half of the result, at row[place(column)]; `place` keeps runs of 8 columns together.
  template <class Place>
  __device__ static void store_row(const float (&o)[D / 8][4], int half, float* row, int lane, Place place) {
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
      *reinterpret_cast<float2*>(row + place(n * 8 + lane % 4 * 2)) = {o[n][half * 2], o[n][half * 2 + 1]};
  }

  // The same to a row of the mailbox.
  __device__ static void send_row(const float (&o)[D / 8][4], int half, uint32_t* row, int lane) {
    const int i = half * 2;
#pragma unroll
    for (int n = 0; n < D / 8; n += 4)
      store_relaxed(row + mail_word(n * 8 + lane % 4 * 2),
                    uint4{pack(o[n][i], o[n][i + 1]), pack(o[n + 1][i], o[n + 1][i + 1]),
                          pack(o[n + 2][i], o[n + 2][i + 1]), pack(o[n + 3][i], o[n + 3][i + 1])});
  }
};

// A lane converts what it multiplies, so its bytes must come as it needs them.
//
// Keys: the order of the dimensions in a dot product is free. A lane takes whole chunks of 16 from the rows
// of its keys, four dimensions of each for one matrix product, and the queries follow this order.
// Values: a transposed load moves pairs of neighbouring dimensions; exchanging the two inner bytes of the
// pairs of two keys gives pairs of keys, one for an even and one for an odd dimension. So of 16 columns of
// the result the first product has the even ones and the second the odd ones.
template <int D>
struct DecodeStep<D, Fp8Cache> {
  static constexpr int kKeys = 32;
  static constexpr int kRowBytes = D;
  static constexpr int kTileChunks = D / 64;  // of a row, for one lane

  // Eight rows' chunks c fall into different groups of 4 banks, and so do, of two neighbouring rows, the
  // chunks that four lanes take at once.
  __device__ static uint32_t offset(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ (D == 64 ? row >> 1 & 3 : row & 7)) << 4);
  }
  // Chunk j of those that lanes with this t take.
  __device__ static int chunk_of(int j, int t) { return D == 64 ? t : j / 2 * 8 + t * 2 + j % 2; }

  __device__ static void read_query(uint32_t (&q)[D / 16][4], int half, const bf16* row, int lane) {
#pragma unroll
    for (int j = 0; j < kTileChunks; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint4 eight{};
        if (row) eight = *reinterpret_cast<const uint4*>(row + chunk_of(j, lane % 4) * 16 + i * 8);
        q[j * 4 + i * 2][half] = bf16_to_f16(eight.x);
        q[j * 4 + i * 2][half + 2] = bf16_to_f16(eight.y);
        q[j * 4 + i * 2 + 1][half] = bf16_to_f16(eight.z);
        q[j * 4 + i * 2 + 1][half + 2] = bf16_to_f16(eight.w);
      }
  }

  __device__ static void multiply_keys(float (&scores)[kKeys / 8][4], const uint32_t (&q)[D / 16][4],
                                       uint32_t tile, int lane) {
#pragma unroll
    for (int j = 0; j < kTileChunks; ++j) {
      const uint32_t keys = tile + offset(lane / 4, chunk_of(j, lane % 4));
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        uint32_t fours[4];
        load_16(fours, keys + n * 8 * kRowBytes);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t b[2];
          fp8_to_f16(fours[i], b[0], b[1]);
          multiply_accumulate_f16(scores[n], q[j * 4 + i], b[0], b[1]);
        }
      }
    }
  }

  __device__ static void multiply_values(float (&o)[D / 8][4], const float (&p)[kKeys / 8][4], uint32_t tile,
                                         int lane) {
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      const uint32_t weights[4] = {pack_f16(p[2 * k][0], p[2 * k][1]), pack_f16(p[2 * k][2], p[2 * k][3]),
                                   pack_f16(p[2 * k + 1][0], p[2 * k + 1][1]),
                                   pack_f16(p[2 * k + 1][2], p[2 * k + 1][3])};
#pragma unroll
      for (int n = 0; n < D / 32; ++n) {
        // Matrices: (keys 0-7, 16 columns) (keys 8-15, the same) and both of the 16 columns behind these.
        uint32_t fours[4];
        load_matrices_transposed(fours, tile + offset(k * 16 + lane % 16, 2 * n + lane / 16));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t even[2], odd[2];
#pragma unroll
          for (int half = 0; half < 2; ++half)
            fp8_to_f16(__byte_perm(fours[i * 2 + half], 0, 0x3120), even[half], odd[half]);
          multiply_accumulate_f16(o[4 * n + 2 * i], weights, even[0], even[1]);
          multiply_accumulate_f16(o[4 * n + 2 * i + 1], weights, odd[0], odd[1]);
        }
      }
    }
  }

  template <class Place>
  __device__ static void store_row(const float (&o)[D / 8][4], int half, float* row, int lane, Place place) {
#pragma unroll
    for (int m = 0; m < D / 16; ++m) {
      const float (&even)[4] = o[2 * m], (&odd)[4] = o[2 * m + 1];
      *reinterpret_cast<float4*>(row + place(m * 16 + lane % 4 * 4)) = {
          even[half * 2], odd[half * 2], even[half * 2 + 1], odd[half * 2 + 1]};
    }
  }

  __device__ static void send_row(const float (&o)[D / 8][4], int half, uint32_t* row, int lane) {
#pragma unroll
    for (int m = 0; m < D / 16; ++m)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        store_relaxed(row + mail_word(m * 16 + lane % 4 * 4 + e * 2),
                      pack(o[2 * m][half * 2 + e], o[2 * m + 1][half * 2 + e]));
  }
};

}  // namespace bequest::cuda
