// Memory-bound: each head is read once and written once. A warp has a head in its registers: the norm is a
// warp reduction, and the rotation meets its partner dimension, which may be any lane's, through shared
// memory.
#include "core/cuda.cuh"
#include "ops/rope_cuda.h"

namespace bequest::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kMaxHeadDim = 256;

enum class HeadKind { kQuery, kKey, kValue };

struct Head {
  HeadKind kind;
  int index;  // among its kind
};

__device__ __forceinline__ Head head_of(const QkvParams& p, int head) {
  const int q_heads = static_cast<int>(p.q_heads);
  const int k_heads = static_cast<int>(p.k_heads);
  if (head < q_heads) return {HeadKind::kQuery, head};
  if (head < q_heads + k_heads) return {HeadKind::kKey, head - q_heads};
  return {HeadKind::kValue, head - q_heads - k_heads};
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

// The angles of a lane's elements, the same for all heads of a token; elements that do not turn have
// cosine 1.
template <int E>
struct Angles {
  float cosine[E];
  float sine[E];  // negative in the first half: x * cosine + partner * sine

  // `whole`: all elements turn, and a lane's are all in one half.
  __device__ Angles(const QkvParams& p, int64_t token, int lane, bool whole) {
    const int half = static_cast<int>(p.rotary_dim) / 2;
    const float* table = p.cos_sin ? p.cos_sin + p.positions[token] * p.rotary_dim : nullptr;
    const float sign = lane < kWarp / 2 ? -1.0f : 1.0f;
    if (table && whole) {
      // Lanes read neighbouring vectors: element by element each load would touch all of the table's row.
      constexpr int kWide = E < 4 ? E : 4;
      const float* mine = table + (lane % (kWarp / 2)) * E;
#pragma unroll
      for (int i = 0; i < E; i += kWide) {
        load_constant<float, kWide>(mine + i, reinterpret_cast<float (&)[kWide]>(cosine[i]));
        load_constant<float, kWide>(mine + half + i, reinterpret_cast<float (&)[kWide]>(sine[i]));
      }
#pragma unroll
      for (int i = 0; i < E; ++i) sine[i] *= sign;
      return;
    }
#pragma unroll
    for (int i = 0; i < E; ++i) {
      const int d = lane * E + i;
      const bool turns = table && d < 2 * half;
      const int angle = d < half ? d : d - half;
      cosine[i] = turns ? __ldg(table + angle) : 1.0f;
      sine[i] = turns ? __ldg(table + half + angle) * (d < half ? -1.0f : 1.0f) : 0.0f;
    }
  }
};

template <class T, int E>
__device__ __forceinline__ void normalise(const float (&weight)[E], float eps, int64_t head_dim,
                                          float (&x)[E]) {
  float square = 0;
#pragma unroll
  for (int i = 0; i < E; ++i) square += x[i] * x[i];
  const float scale = rsqrtf(warp_sum(square) / static_cast<float>(head_dim) + eps);
  // Rounded between norm and rotation, as two separate operations would.
#pragma unroll
  for (int i = 0; i < E; ++i) x[i] = rounded<T>(x[i] * scale * weight[i]);
}

// `staged` [kWarp * E] is this warp's. `halves`: the partner of a dimension is in the other half of the warp.
template <int E>
__device__ __forceinline__ void rotate(const Angles<E>& angles, int half, bool halves, int lane,
                                       float* staged, float (&x)[E]) {
  float partner[E];
  if (halves) {
#pragma unroll
    for (int i = 0; i < E; ++i) partner[i] = __shfl_xor_sync(kAllLanes, x[i], kWarp / 2);
  } else {
#pragma unroll
    for (int i = 0; i < E; ++i) staged[lane * E + i] = x[i];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < E; ++i) {
      const int d = lane * E + i;
      partner[i] = d < half ? staged[d + half] : d < 2 * half ? staged[d - half] : 0.0f;
    }
    __syncwarp();  // before the next head is staged
  }
#pragma unroll
  for (int i = 0; i < E; ++i) x[i] = x[i] * angles.cosine[i] + partner[i] * angles.sine[i];
}

// Where a head is read.
template <class T>
__device__ __forceinline__ T* source_of(const QkvParams& p, int64_t token, const Head& head) {
  T* base = head.kind == HeadKind::kQuery ? static_cast<T*>(p.q) + token * p.q_stride
            : head.kind == HeadKind::kKey ? static_cast<T*>(p.k) + token * p.k_stride
                                          : static_cast<T*>(p.v) + token * p.v_stride;
  return base + head.index * p.head_dim;
}

// Elements from the start of the cache to the key of the slot's head 0. KvLayout::key_of_slot with a 32-bit
// division: the other kind costs more than all the rest of the kernel.
__device__ __forceinline__ int64_t first_key(const QkvParams& p, int64_t slot) {
  const auto block_size = static_cast<uint32_t>(p.layout.block_size);
  const uint32_t block = static_cast<uint32_t>(slot) / block_size;
  const uint32_t offset = static_cast<uint32_t>(slot) - block * block_size;
  return block * p.layout.block_stride() + p.layout.keys(p.layer, 0) + offset * p.head_dim;
}

// A key or value head to its place in the cache; `key` is that of the token's head 0.
template <class C, int E, bool kFull>
__device__ __forceinline__ void store_cached(const QkvParams& p, const Head& head, int64_t key, int lane,
                                             float (&x)[E]) {
  const bool is_value = head.kind == HeadKind::kValue;
  C* to = static_cast<C*>(p.kv_cache) + key + p.layout.keys(0, head.index);
  if (is_value) to += p.layout.values_after_keys();
  if constexpr (std::is_same_v<C, Float8>) {
    const float factor = is_value ? p.value_factor : p.key_factor;
#pragma unroll
    for (int i = 0; i < E; ++i) x[i] *= factor;
  }
  store_head<C, E, kFull>(to, lane, p.head_dim, x);
}

// A warp has kHeads consecutive heads of a token, all of them loaded before the first is worked on. The cache
// is of type C.
template <class T, class C, int E, bool kFull, int kHeads>
__global__ void prepare_qkv_kernel(const QkvParams p) {
  __shared__ float staged[kWarps][kWarp * E];
  let_next_start();
  wait_for_previous();
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int64_t token = blockIdx.x;
  const int first = static_cast<int>(blockIdx.y * kWarps + warp) * kHeads;
  const int end = static_cast<int>(p.q_heads + (p.kv_cache ? 2 : 1) * p.k_heads);
  if (first >= end) return;

  // Nothing here waits for anything else.
  float x[kHeads][E];
#pragma unroll
  for (int h = 0; h < kHeads; ++h)
    if (first + h < end)
      load_head<T, E, kFull>(source_of<T>(p, token, head_of(p, first + h)), lane, p.head_dim, x[h]);
  const int64_t slot = p.kv_cache ? p.slots[token] : -1;
  float weight[2][E];  // of queries and keys
  if (p.q_weight) {
    load_head<T, E, kFull>(static_cast<const T*>(p.q_weight), lane, p.head_dim, weight[0]);
    load_head<T, E, kFull>(static_cast<const T*>(p.k_weight), lane, p.head_dim, weight[1]);
  }
  const bool whole = kFull && p.rotary_dim == p.head_dim;
  const Angles<E> angles(p, token, lane, whole);
  const int64_t key = slot >= 0 ? first_key(p, slot) : 0;

#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (first + h >= end) return;
    const Head head = head_of(p, first + h);
    const bool is_query = head.kind == HeadKind::kQuery;
    if (!is_query && p.kv_cache && slot < 0) return;  // keys and values come last
    if (head.kind != HeadKind::kValue) {
      if (p.q_weight) {
        float w[E];
#pragma unroll
        for (int i = 0; i < E; ++i) w[i] = is_query ? weight[0][i] : weight[1][i];
        normalise<T, E>(w, p.eps, p.head_dim, x[h]);
      }
      if (p.cos_sin) rotate<E>(angles, static_cast<int>(p.rotary_dim) / 2, whole, lane, staged[warp], x[h]);
    }
    if (is_query || !p.kv_cache)
      store_head<T, E, kFull>(source_of<T>(p, token, head), lane, p.head_dim, x[h]);
    else
      store_cached<C, E, kFull>(p, head, key, lane, x[h]);
  }
}

template <class T, class C, int E, int kHeads>
void launch_heads(const QkvParams& p, Stream stream) {
  constexpr size_t kBytes = E * sizeof(T);
  const bool full = p.head_dim == E * kWarp && is_aligned(p.q, kBytes) && is_aligned(p.k, kBytes) &&
                    is_aligned(p.v, kBytes) && is_aligned(p.q_weight, kBytes) &&
                    is_aligned(p.k_weight, kBytes) && is_aligned(p.kv_cache, kBytes) && p.q_stride % E == 0 &&
                    p.k_stride % E == 0 && p.v_stride % E == 0;
  const int64_t num_heads = p.q_heads + (p.kv_cache ? 2 : 1) * p.k_heads;
  const dim3 grid(static_cast<unsigned>(p.num_tokens),
                  static_cast<unsigned>(ceil_div(num_heads, kWarps * kHeads)));
  const LaunchShape shape{.grid = grid, .block = kWarps * kWarp, .overlaps_previous = true};
  if constexpr (kBytes <= 16)
    if (full) return launch(prepare_qkv_kernel<T, C, E, true, kHeads>, shape, stream, p);
  launch(prepare_qkv_kernel<T, C, E, false, kHeads>, shape, stream, p);
}

// Few tokens: a head per warp, for the latency. Many: four, for the bytes in flight. A head's result is the
// same.
template <class T, class C, int E>
void launch_elements(const QkvParams& p, Stream stream) {
  constexpr int64_t kManyTokens = 128;
  if (p.num_tokens < kManyTokens) return launch_heads<T, C, E, 1>(p, stream);
  launch_heads<T, C, E, 4>(p, stream);
}

template <class T, class C>
void launch_head_dim(const QkvParams& p, Stream stream) {
  if (p.head_dim <= 32) return launch_elements<T, C, 1>(p, stream);
  if (p.head_dim <= 64) return launch_elements<T, C, 2>(p, stream);
  if (p.head_dim <= 128) return launch_elements<T, C, 4>(p, stream);
  return launch_elements<T, C, 8>(p, stream);
}

}  // namespace

void prepare_qkv(const QkvParams& p, Stream stream) {
  check(p.head_dim >= 1 && p.head_dim <= kMaxHeadDim, "prepare_qkv: head dim outside [1, 256]");
  check(!p.cos_sin || (p.rotary_dim >= 0 && p.rotary_dim % 2 == 0 && p.rotary_dim <= p.head_dim),
        "prepare_qkv: rotary dim");
  check(!p.q_weight == !p.k_weight, "prepare_qkv: a norm has two weights");
  check(!p.kv_cache || (p.layout.num_kv_heads == p.k_heads && p.layout.head_dim == p.head_dim &&
                        p.layer >= 0 && p.layer < p.layout.num_layers),
        "prepare_qkv: the cache has another shape");
  check(!p.kv_cache || p.kv_dtype == p.dtype || p.kv_dtype == DType::kF8E4M3,
        "prepare_qkv: the cache has the dtype of the heads, or is fp8");
  check(p.layout.num_slots() <= INT32_MAX, "prepare_qkv: more slots than 32 bits count");
  if (p.num_tokens == 0 || p.q_heads + p.k_heads == 0) return;
  dispatch(p.dtype, [&]<class T>() {
    if (p.kv_cache && p.kv_dtype == DType::kF8E4M3) return launch_head_dim<T, Float8>(p, stream);
    launch_head_dim<T, T>(p, stream);
  });
}

}  // namespace bequest::cuda
