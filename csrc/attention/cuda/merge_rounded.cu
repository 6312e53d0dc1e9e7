// Merges as merge.cu does, and rounds the rows of all tokens to e4m3 (float8_rows.h) on the way: a product of
// rows in float8 behind attention then needs one kernel in front of it, not two. The same bits as both.
//
// A thread block has a token's row. A tile that was cut left states for it; else it is in the output.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "attention/cuda/device_args.cuh"
#include "attention/cuda/merge_states.cuh"
#include "device/launch.cuh"
#include "device/pairs.cuh"
#include "device/reductions.cuh"
#include "device/vectors.cuh"
#include "ops/cuda/float8_rows.cuh"

namespace bequest::cuda {
namespace {

constexpr int kWidth = kVectorWidth<BFloat16>;
constexpr int kMostThreads = 512;
constexpr int kMostVectors = 4;  // of a thread
constexpr int kBatch = 2;        // states that a thread has in flight: a cut tile seldom has more

// The merge entry of this block's token; no states: there is none. By the whole block.
__device__ MergeEntry find_entry(const AttentionArgs& a) {
  __shared__ int found;
  if (threadIdx.x == 0) found = -1;
  __syncthreads();
  const int token = static_cast<int>(blockIdx.x), num_merges = __ldg(a.work_list);
  for (int i = static_cast<int>(threadIdx.x); i < num_merges; i += static_cast<int>(blockDim.x)) {
    const int4 entry = __ldg(a.merges + 2 * i);
    if (token >= entry.x && token < entry.x + entry.y) found = i;
  }
  __syncthreads();
  return found < 0 ? MergeEntry{} : load_entry(a.merges, found);
}

// Columns [column, column + kWidth) of the token's row, as they are after a store in bf16.
__device__ void load_columns(const AttentionArgs& a, const MergeEntry& entry, int column,
                             float (&x)[kWidth]) {
  const int token = static_cast<int>(blockIdx.x);
  if (entry.num_states == 0) {
    const int64_t row = static_cast<int64_t>(token) * a.num_q_heads * a.head_dim;
    return load_vector<BFloat16, kWidth>(static_cast<const BFloat16*>(a.out) + row + column, x);
  }
  const int q_head = column / a.head_dim, kv_head = q_head / a.group;
  const int row = (token - entry.first_token) * a.group + q_head - kv_head * a.group;
  const auto load = [&](int64_t state, float (&o)[kWidth]) {
    const float* values = a.state_values + state * a.head_dim + column - q_head * a.head_dim;
    load_vector<float, 4>(values, reinterpret_cast<float (&)[4]>(o[0]));
    load_vector<float, 4>(values + 4, reinterpret_cast<float (&)[4]>(o[4]));
  };
  const int parts = parts_of_row(entry, a.group);
  PartialState<kWidth> total;
#pragma unroll 1
  for (int part = 0; part < parts; ++part)
    total.merge(merge_part<kWidth, kBatch>(a, entry, row, kv_head, part, parts, load));
  const float inverse = output_factor(a, q_head, total.m, total.d);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] = rounded<BFloat16>(total.o[i] * inverse);
}

// A block of one vector to a thread has room beside one of the decode kernel.
template <int kVectors>
__global__ void __launch_bounds__(kMostThreads, kVectors == 1 ? 2 : 1)
    merge_rounded_kernel(const __grid_constant__ AttentionArgs a, const Float8Rows to, const int width) {
  __shared__ float shared[kMostThreads / kWarp];
  // The product that follows may ask for its weights meanwhile.
  let_next_start();
  const MergeEntry entry = find_entry(a);
  wait_for_previous();
  float x[kVectors][kWidth];
  float largest = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = static_cast<int>(v * blockDim.x + threadIdx.x) * kWidth;
    if (column >= width) break;
    load_columns(a, entry, column, x[v]);
#pragma unroll
    for (float value : x[v]) largest = fmaxf(largest, fabsf(value));
  }
  largest = block_reduce(largest, shared, [](float a, float b) { return fmaxf(a, b); });
  const float scale = float8_scale(largest), factor = 1.0f / scale;
  if (threadIdx.x == 0) to.scales[blockIdx.x] = scale;
  Float8* const codes = static_cast<Float8*>(to.codes) + static_cast<int64_t>(blockIdx.x) * width;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = static_cast<int>(v * blockDim.x + threadIdx.x) * kWidth;
    if (column >= width) break;
#pragma unroll
    for (float& value : x[v]) value *= factor;
    store_vector<Float8, kWidth>(codes + column, x[v]);
  }
}

}  // namespace

void launch_merge_rounded(const AttentionArgs& a, const Float8Rows& to, int64_t num_tokens, Stream stream) {
  const int width = a.num_q_heads * a.head_dim;
  check(width <= kMostVectors * kMostThreads * kWidth, "attention: rows to be rounded are too wide");
  check(is_aligned(a.out, 16) && is_aligned(to.codes, 8),
        "attention: results are aligned to 16 bytes, their codes to 8");
  const int vectors = width / kWidth;
  const LaunchShape shape{
      .grid = static_cast<unsigned>(num_tokens),
      .block = static_cast<unsigned>(std::min<int64_t>(round_up(vectors, kWarp), kMostThreads)),
      .overlaps_previous = true};
  if (vectors <= kMostThreads) return launch(merge_rounded_kernel<1>, shape, stream, a, to, width);
  if (vectors <= 2 * kMostThreads) return launch(merge_rounded_kernel<2>, shape, stream, a, to, width);
  launch(merge_rounded_kernel<kMostVectors>, shape, stream, a, to, width);
}

}  // namespace bequest::cuda
