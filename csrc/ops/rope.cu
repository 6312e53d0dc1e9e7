// Memory-bound: each head is read once and written once. A warp has a head in its registers: the norm is a
// warp reduction, and the rotation meets its partner dimension, which may be any lane's, through shared
// memory.
#include <algorithm>

#include "core/cuda.cuh"
#include "ops/rope_cuda.h"

namespace bequest::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kMaxHeadDim = 256;

enum class HeadKind { kQuery, kKey, kValue };

struct Head {
  HeadKind kind;
  int64_t index;  // among its kind
};

__device__ __forceinline__ Head head_of(const QkvParams& p, int64_t head) {
  if (head < p.q_heads) return {HeadKind::kQuery, head};
  if (head < p.q_heads + p.k_heads) return {HeadKind::kKey, head - p.q_heads};
  return {HeadKind::kValue, head - p.q_heads - p.k_heads};
}

// Elements lane * E + [0, E) of a head; those from D on are zero.
template <class T, int E, bool kFull>
__device__ __forceinline__ void load_head(const T* p, int lane, int64_t head_dim, float (&x)[E]) {
  if constexpr (kFull) {
    load_vector<T, E>(p + lane * E, x);
  } else {
#pragma unroll
    for (int i = 0; i < E; ++i) x[i] = lane * E + i < head_dim ? widen(p[lane * E + i]) : 0.0f;
  }
}

template <class T, int E, bool kFull>
__device__ __forceinline__ void store_head(T* p, int lane, int64_t head_dim, const float (&x)[E]) {
  if constexpr (kFull) {
    store_vector<T, E>(p + lane * E, x);
  } else {
#pragma unroll
    for (int i = 0; i < E; ++i)
      if (lane * E + i < head_dim) p[lane * E + i] = narrow<T>(x[i]);
  }
}

template <class T, int E, bool kFull>
__device__ __forceinline__ void normalise(const T* weight, float eps, int lane, int64_t head_dim,
                                          float (&x)[E]) {
  float square = 0;
#pragma unroll
  for (int i = 0; i < E; ++i) square += x[i] * x[i];
  const float scale = rsqrtf(warp_sum(square) / static_cast<float>(head_dim) + eps);
  float w[E];
  load_head<T, E, kFull>(weight, lane, head_dim, w);
  // Rounded between norm and rotation, as two separate operations would.
#pragma unroll
  for (int i = 0; i < E; ++i) x[i] = rounded<T>(x[i] * scale * w[i]);
}

// `angles` [R] of the token's position; `staged` [D] is this warp's.
template <int E>
__device__ __forceinline__ void rotate(const float* angles, int rotary_dim, int lane, float* staged,
                                       float (&x)[E]) {
#pragma unroll
  for (int i = 0; i < E; ++i) staged[lane * E + i] = x[i];
  __syncwarp();
  const int half = rotary_dim / 2;
#pragma unroll
  for (int i = 0; i < E; ++i) {
    const int d = lane * E + i;
    if (d >= rotary_dim) continue;
    const int angle = d < half ? d : d - half;
    const float cosine = __ldg(angles + angle);
    const float sine = __ldg(angles + half + angle);
    x[i] = d < half ? x[i] * cosine - staged[d + half] * sine : x[i] * cosine + staged[d - half] * sine;
  }
  __syncwarp();  // before the next head is staged
}

template <class T, int E, bool kFull>
__global__ void prepare_qkv_kernel(const QkvParams p) {
  __shared__ float staged[kWarps][kWarp * E];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int64_t token = blockIdx.x;
  const int64_t slot = p.kv_cache ? p.slots[token] : -1;
  const int64_t num_heads = p.q_heads + (p.kv_cache ? 2 : 1) * p.k_heads;

  for (int64_t head = blockIdx.y * kWarps + warp; head < num_heads; head += gridDim.y * kWarps) {
    const auto [kind, index] = head_of(p, head);
    const bool is_query = kind == HeadKind::kQuery;
    if (!is_query && p.kv_cache && slot < 0) return;  // keys and values come last
    T* from = is_query                 ? static_cast<T*>(p.q) + token * p.q_stride
              : kind == HeadKind::kKey ? static_cast<T*>(p.k) + token * p.k_stride
                                       : static_cast<T*>(p.v) + token * p.v_stride;
    from += index * p.head_dim;
    float x[E];
    load_head<T, E, kFull>(from, lane, p.head_dim, x);
    if (kind != HeadKind::kValue) {
      const T* weight = static_cast<const T*>(is_query ? p.q_weight : p.k_weight);
      if (weight) normalise<T, E, kFull>(weight, p.eps, lane, p.head_dim, x);
      if (p.cos_sin)
        rotate<E>(p.cos_sin + p.positions[token] * p.rotary_dim, static_cast<int>(p.rotary_dim), lane,
                  staged[warp], x);
    }
    T* to = from;
    if (!is_query && p.kv_cache) {
      to = static_cast<T*>(p.kv_cache) + p.layout.key_of_slot(slot, p.layer, index);
      if (kind == HeadKind::kValue) to += p.layout.values_after_keys();
    }
    store_head<T, E, kFull>(to, lane, p.head_dim, x);
  }
}

template <class T, int E>
void launch_elements(const QkvParams& p, Stream stream) {
  constexpr size_t kBytes = E * sizeof(T);
  const bool full = p.head_dim == E * kWarp && kBytes <= 16 && is_aligned(p.q, kBytes) &&
                    is_aligned(p.k, kBytes) && is_aligned(p.v, kBytes) && is_aligned(p.q_weight, kBytes) &&
                    is_aligned(p.k_weight, kBytes) && is_aligned(p.kv_cache, kBytes) && p.q_stride % E == 0 &&
                    p.k_stride % E == 0 && p.v_stride % E == 0;
  const int64_t num_heads = p.q_heads + (p.kv_cache ? 2 : 1) * p.k_heads;
  // Few tokens: a head per warp. Many: up to four, so that a block is worth its start.
  constexpr int64_t kBlocksThatFill = 132 * 16;
  const int64_t most = ceil_div(num_heads, kWarps);
  const int64_t fewest = ceil_div(num_heads, kWarps * 4);
  const int64_t blocks = std::clamp(ceil_div(kBlocksThatFill, p.num_tokens), fewest, most);
  const LaunchShape shape{{static_cast<unsigned>(p.num_tokens), static_cast<unsigned>(blocks)},
                          kWarps * kWarp};
  if constexpr (kBytes <= 16)
    if (full) return launch(prepare_qkv_kernel<T, E, true>, shape, stream, p);
  launch(prepare_qkv_kernel<T, E, false>, shape, stream, p);
}

}  // namespace

void prepare_qkv(const QkvParams& p, Stream stream) {
  check(p.head_dim >= 1 && p.head_dim <= kMaxHeadDim, "prepare_qkv: head dim outside [1, 256]");
  check(!p.cos_sin || (p.rotary_dim >= 0 && p.rotary_dim % 2 == 0 && p.rotary_dim <= p.head_dim),
        "prepare_qkv: rotary dim");
  check(!p.kv_cache || (p.layout.num_kv_heads == p.k_heads && p.layout.head_dim == p.head_dim &&
                        p.layer >= 0 && p.layer < p.layout.num_layers),
        "prepare_qkv: the cache has another shape");
  if (p.num_tokens == 0 || p.q_heads + p.k_heads == 0) return;
  dispatch(p.dtype, [&]<class T>() {
    if (p.head_dim <= 32) return launch_elements<T, 1>(p, stream);
    if (p.head_dim <= 64) return launch_elements<T, 2>(p, stream);
    if (p.head_dim <= 128) return launch_elements<T, 4>(p, stream);
    return launch_elements<T, 8>(p, stream);
  });
}

}  // namespace bequest::cuda
