// Attention in float32 for any head dim up to 512, over a cache in float32 or fp8: simple, for comparisons
// with float32 references.
//
// A warp takes one row (query token and head) and walks all its keys in order, so that the result of a row
// depends on nothing else in the step.
#include <cuda_runtime.h>

#include "attention/cuda/device_args.cuh"
#include "device/launch.cuh"
#include "device/reductions.cuh"
#include "device/vectors.cuh"

namespace bequest::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kUnroll = 4;  // keys in flight

// A lane holds kPerLane dimensions of a row: lane + 32 * i.
template <int kPerLane>
struct RowState {
  float o[kPerLane] = {};
  float m = -INFINITY;
  float d = 0.0f;
};

struct QueryRow {
  int head;  // of NQ
  int position;
};

template <class T>
__device__ const T* key_of(const AttentionArgs& a, const int32_t* table, int kv_head, int key) {
  return static_cast<const T*>(a.keys) + table[key / a.block_size] * a.block_stride +
         static_cast<int64_t>(kv_head) * a.head_stride + key % a.block_size * a.head_dim;
}

template <class T, int kPerLane>
__device__ void add_keys(const AttentionArgs& a, const int32_t* table, int kv_head,
                         const float (&q)[kPerLane], const QueryRow& row, int key, int end, int lane,
                         RowState<kPerLane>& state) {
  float scores[kUnroll];
  const T* keys[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    keys[u] = key_of<T>(a, table, kv_head, min(key + u, end - 1));
    float dot = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (lane + 32 * i < a.head_dim) dot = fmaf(q[i], widen(keys[u][lane + 32 * i]), dot);
    dot = warp_sum(dot);
    scores[u] =
        a.cap_factor > 0.0f ? score_in_log2<Scores::kSoftCap>(dot, a) : score_in_log2<Scores::kPlain>(dot, a);
    if (a.bias != nullptr) scores[u] = BiasRow(a, row.head).add(scores[u], key + u, row.position);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (key + u >= end) break;
    const float m = fmaxf(state.m, scores[u]);
    const float old = exp2f(state.m - m);
    const float p = exp2f(scores[u] - m);
    state.m = m;
    state.d = state.d * old + p;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (lane + 32 * i < a.head_dim)
        state.o[i] = state.o[i] * old + p * widen(keys[u][a.values_after_keys + lane + 32 * i]);
  }
}

template <class T, int kPerLane>
__device__ void attend_row(const AttentionArgs& a, const WorkItem& item, int kv_head, int row, int lane) {
  const int64_t token = item.first_token + row / a.group;
  const int head = kv_head * a.group + row % a.group;
  const float* source = static_cast<const float*>(a.q) + token * a.q_stride + head * a.head_dim;
  float q[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) q[i] = lane + 32 * i < a.head_dim ? source[lane + 32 * i] : 0.0f;

  const int position = item.first_position + row / a.group;
  const int begin = max(item.kv_begin, position - a.window + 1);
  const int end = min(item.kv_end, position + 1);
  const int32_t* table = a.block_tables + item.sequence * a.max_blocks;
  RowState<kPerLane> state;
  for (int key = begin; key < end; key += kUnroll)
    add_keys<T, kPerLane>(a, table, kv_head, q, {head, position}, key, end, lane, state);

  const float factor = output_factor(a, head, state.m, state.d) * a.value_scale;
  float* out = static_cast<float*>(a.out) + (token * a.num_q_heads + head) * a.head_dim;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i)
    if (lane + 32 * i < a.head_dim) out[lane + 32 * i] = state.o[i] * factor;
}

template <class T, int kPerLane>
__global__ void __launch_bounds__(kWarps * 32) f32_kernel(const __grid_constant__ AttentionArgs a) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int num_tickets = __ldg(a.num_items) * a.num_kv_heads;
  for (int ticket = blockIdx.x; ticket < num_tickets; ticket += gridDim.x) {
    const WorkItem item = load_item(a.items, ticket / a.num_kv_heads);
    for (int row = warp; row < item.num_tokens * a.group; row += kWarps)
      attend_row<T, kPerLane>(a, item, ticket % a.num_kv_heads, row, lane);
  }
}

}  // namespace

void launch_f32(const AttentionArgs& a, DType cache, int blocks, Stream stream) {
  check(a.head_dim <= 512, "float32 attention: head_dim must be at most 512");
  const auto start = [&](auto kernel) {
    launch(kernel, {.grid = static_cast<unsigned>(blocks), .block = kWarps * kWarp}, stream, a);
  };
  const bool is_fp8 = cache == DType::kF8E4M3;
  if (a.head_dim <= 256) return start(is_fp8 ? f32_kernel<Float8, 8> : f32_kernel<float, 8>);
  start(is_fp8 ? f32_kernel<Float8, 16> : f32_kernel<float, 16>);
}

}  // namespace bequest::cuda
