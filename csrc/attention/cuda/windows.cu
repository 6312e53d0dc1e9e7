// Memory-bound: each head is read once, turned on its way to shared memory, and written once. A block has one
// head of one window, and each of its four warps 16 queries, whose scores of all keys are in registers.
#include "attention/cuda/windows.h"

#include <math_constants.h>

#include "device/copies.cuh"
#include "device/launch.cuh"
#include "device/pairs.cuh"
#include "device/reductions.cuh"
#include "device/shared_memory.cuh"
#include "device/tensor_core.cuh"
#include "device/vectors.cuh"

namespace bequest::cuda {
namespace {

constexpr int kRows = static_cast<int>(kWindowPatches), kDim = static_cast<int>(kWindowHeadDim);
constexpr int kThreads = 128, kHalf = kDim / 2;
constexpr int kChunk = 8;                     // elements of 16 bytes
constexpr int kStride = (kDim + kChunk) * 2;  // bytes of a row: eight rows fall into different banks
constexpr int kTileBytes = kRows * kStride;   // of queries, keys or values
constexpr float kLog2E = 1.4426950408889634f;

// What a block works on.
struct Window {
  int first;  // patch
  int count;
};

__device__ __forceinline__ const BFloat16* source(const WindowParams& p, int64_t patch, int part, int head) {
  return static_cast<const BFloat16*>(p.qkv) + ((patch * 3 + part) * p.num_heads + head) * kDim;
}

__device__ __forceinline__ void store_chunk(uint32_t address, const float (&x)[kChunk]) {
  store_16(address, make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])));
}

__device__ __forceinline__ void load_floats(const float* from, float (&x)[kChunk]) {
#pragma unroll
  for (int i = 0; i < kChunk; i += 4) {
    const float4 four = __ldg(reinterpret_cast<const float4*>(from + i));
    x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
  }
}

// A chunk of the first half of a head and the one in the second half that it turns with.
struct Turning {
  float first[kChunk] = {}, second[kChunk] = {};

  __device__ __forceinline__ void load(const BFloat16* x) {
    load_vector<BFloat16, kChunk>(x, first);
    load_vector<BFloat16, kChunk>(x + kHalf, second);
  }
  __device__ __forceinline__ void turn(const float (&cosines)[kChunk], const float (&sines)[kChunk]) {
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      const float turned = first[j] * cosines[j] + second[j] * -sines[j];
      second[j] = second[j] * cosines[j] + first[j] * sines[j];
      first[j] = turned;
    }
  }
  __device__ __forceinline__ void store(uint32_t address) const {
    store_chunk(address, first);
    store_chunk(address + kHalf * 2, second);
  }
};

// Queries and keys, turned: they share cosines and sines. Rows without a patch become zeros.
__device__ void read_turned(const WindowParams& p, const Window& window, int head, uint32_t queries,
                            uint32_t keys) {
  constexpr int kParts = kHalf / kChunk;
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kParts; i += kThreads) {
    const int row = i / kParts, at = i % kParts * kChunk;
    Turning query, key;
    if (row < window.count) {
      const int64_t patch = window.first + row;
      float cosines[kChunk], sines[kChunk];
      query.load(source(p, patch, 0, head) + at);
      key.load(source(p, patch, 1, head) + at);
      load_floats(p.cos_sin + patch * kDim + at, cosines);
      load_floats(p.cos_sin + patch * kDim + kHalf + at, sines);
      query.turn(cosines, sines);
      key.turn(cosines, sines);
    }
    query.store(queries + row * kStride + at * 2);
    key.store(keys + row * kStride + at * 2);
  }
}

// Asks for values. Rows without a patch become zeros.
__device__ void ask_values(const WindowParams& p, const Window& window, int head, uint32_t tile) {
  constexpr int kChunks = kDim / kChunk;
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const bool is_there = row < window.count;
    copy_16_async(tile + row * kStride + chunk * 16,
                  source(p, window.first + (is_there ? row : 0), 2, head) + chunk * kChunk, is_there);
  }
  commit_copies();
}

// Lane addresses for load_matrices on 16 rows and two chunks, as tensor_core.cuh names the orders.
__device__ __forceinline__ uint32_t rows_first(int lane) {
  return ((lane >> 3 & 1) * 8 + (lane & 7)) * kStride + (lane >> 4) * 16;
}
__device__ __forceinline__ uint32_t columns_first(int lane) {
  return ((lane >> 4) * 8 + (lane & 7)) * kStride + (lane >> 3 & 1) * 16;
}

// A warp's 16 queries · all keys.
__device__ __forceinline__ void multiply_keys(uint32_t queries, uint32_t keys, int lane,
                                              float (&scores)[kRows / 8][4]) {
#pragma unroll
  for (int d = 0; d < kDim / 16; ++d) {
    uint32_t a[4];
    load_matrices(a, queries + rows_first(lane) + d * 32);
#pragma unroll
    for (int n = 0; n < kRows / 16; ++n) {
      uint32_t b[4];
      load_matrices(b, keys + n * 16 * kStride + columns_first(lane) + d * 32);
      multiply_accumulate(scores[2 * n], a, b[0], b[1]);
      multiply_accumulate(scores[2 * n + 1], a, b[2], b[3]);
    }
  }
}

// Scores become weights, not yet divided by their sum: that of rows lane / 4 and lane / 4 + 8.
__device__ __forceinline__ void weigh(float scale, int count, int lane, float (&scores)[kRows / 8][4],
                                      float (&sums)[2]) {
  float most[2] = {-CUDART_INF_F, -CUDART_INF_F};
#pragma unroll
  for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = n * 8 + lane % 4 * 2 + i % 2;
      scores[n][i] = key < count ? scores[n][i] * (scale * kLog2E) : -CUDART_INF_F;
      most[i / 2] = fmaxf(most[i / 2], scores[n][i]);
    }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    most[half] = quad_max(most[half]);
    sums[half] = 0;
  }
#pragma unroll
  for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[n][i] = exp2f(scores[n][i] - most[i / 2]);
      sums[i / 2] += scores[n][i];
    }
#pragma unroll
  for (int half = 0; half < 2; ++half) sums[half] = quad_sum(sums[half]);
}

__device__ __forceinline__ void multiply_values(const float (&weights)[kRows / 8][4], uint32_t values,
                                                int lane, float (&gathered)[kDim / 8][4]) {
#pragma unroll
  for (int n = 0; n < kRows / 16; ++n) {
    const float (&low)[4] = weights[2 * n];
    const float (&high)[4] = weights[2 * n + 1];
    const uint32_t a[4] = {pack(low[0], low[1]), pack(low[2], low[3]), pack(high[0], high[1]),
                           pack(high[2], high[3])};
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      uint32_t b[4];
      load_matrices_transposed(b, values + n * 16 * kStride + rows_first(lane) + d * 32);
      multiply_accumulate(gathered[2 * d], a, b[0], b[1]);
      multiply_accumulate(gathered[2 * d + 1], a, b[2], b[3]);
    }
  }
}

// Through the warp's own rows of the query tile, so that 16 bytes are written at a time.
__device__ void write_rows(const WindowParams& p, const Window& window, int head, int first_row,
                           uint32_t rows, const float (&gathered)[kDim / 8][4], const float (&sums)[2]) {
  const int lane = threadIdx.x % kWarp;
  __syncwarp();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float factor = 1.0f / sums[half];
    const uint32_t row = rows + (lane / 4 + half * 8) * kStride + lane % 4 * 4;
#pragma unroll
    for (int d = 0; d < kDim / 8; ++d) {
      const uint32_t pair = pack(gathered[d][2 * half] * factor, gathered[d][2 * half + 1] * factor);
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(row + d * 16), "r"(pair) : "memory");
    }
  }
  __syncwarp();
  constexpr int kChunks = kDim / kChunk;
  for (int i = lane; i < 16 * kChunks; i += kWarp) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (first_row + row >= window.count) break;
    BFloat16* const to = static_cast<BFloat16*>(p.out) +
                         (int64_t{window.first + first_row + row} * p.num_heads + head) * kDim +
                         chunk * kChunk;
    *reinterpret_cast<uint4*>(to) = load_16(rows + row * kStride + chunk * 16);
  }
}

__global__ void __launch_bounds__(kThreads) attend_windows_kernel(const WindowParams p) {
  __shared__ __align__(16) uint8_t tiles[3 * kTileBytes];
  let_next_start();
  const int head = static_cast<int>(blockIdx.x);
  const Window window{p.begin[blockIdx.y], p.begin[blockIdx.y + 1] - p.begin[blockIdx.y]};
  const uint32_t queries = shared_address(tiles), keys = queries + kTileBytes, values = keys + kTileBytes;
  wait_for_previous();
  ask_values(p, window, head, values);
  read_turned(p, window, head, queries, keys);
  wait_copies<0>();
  __syncthreads();
  const int lane = threadIdx.x % kWarp, first_row = static_cast<int>(threadIdx.x) / kWarp * 16;
  if (first_row >= window.count) return;
  const uint32_t own = queries + first_row * kStride;
  float scores[kRows / 8][4] = {}, gathered[kDim / 8][4] = {}, sums[2];
  multiply_keys(own, keys, lane, scores);
  weigh(p.scale, window.count, lane, scores, sums);
  multiply_values(scores, values, lane, gathered);
  write_rows(p, window, head, first_row, own, gathered, sums);
}

}  // namespace

void attend_windows(const WindowParams& p, Stream stream) {
  check(p.num_heads > 0 && p.num_windows <= 65535, "attend_windows: sizes");
  check(is_aligned(p.qkv, 16) && is_aligned(p.out, 16) && is_aligned(p.cos_sin, 16),
        "attend_windows: alignment");
  const dim3 grid(static_cast<unsigned>(p.num_heads), static_cast<unsigned>(p.num_windows));
  launch(attend_windows_kernel, {.grid = grid, .block = kThreads, .overlaps_previous = true}, stream, p);
}

}  // namespace bequest::cuda
