// Memory-bound: each head is read once and written once.
#include "device/launch.cuh"
#include "device/reductions.cuh"
#include "ops/cuda/qkv_heads.cuh"

namespace bequest::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kMaxHeadDim = 512;
constexpr int kTurnThreads = 192;
constexpr int64_t kManyTokens = 128;

// A warp has kHeads consecutive heads of a token, all of them loaded before the first is worked on. The cache
// is of type C.
template <class T, class C, int E, bool kFull, int kHeads>
__global__ void prepare_qkv_kernel(const QkvParams p) {
  __shared__ float staged[kWarps][kWarp * E];
  let_next_start();
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int64_t token = blockIdx.x;
  const int first = static_cast<int>(blockIdx.y * kWarps + warp) * kHeads;
  const int end = static_cast<int>(p.q_heads + (p.kv_cache ? 2 : 1) * p.k_heads);
  if (first >= end) return wait_for_previous();

  // What came before any kernel of the step.
  const int64_t slot = p.kv_cache ? p.slots[token] : -1;
  float weight[2][E];  // of queries and keys
  if (p.q_weight) {
    load_head<T, E, kFull>(static_cast<const T*>(p.q_weight), lane, p.head_dim, weight[0]);
    load_head<T, E, kFull>(static_cast<const T*>(p.k_weight), lane, p.head_dim, weight[1]);
  }
  const bool whole = kFull && p.rotary_dim == p.head_dim;
  const Angles<E> angles(p, token, lane, whole);
  const int64_t key = slot >= 0 ? first_key(p, slot) : 0;
  const float query_scale = p.query_scales ? __ldg(p.query_scales + p.positions[token]) : 1.0f;

  wait_for_previous();
  float x[kHeads][E];
#pragma unroll
  for (int h = 0; h < kHeads; ++h)
    if (first + h < end)
      load_head<T, E, kFull>(source_of<T>(p, token, head_of(p, first + h)), lane, p.head_dim, x[h]);
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
        for (int i = 0; i < E; ++i) w[i] = (is_query ? weight[0][i] : weight[1][i]) + p.weight_offset;
        normalise<T, E>(w, p.eps, p.head_dim, x[h]);
      }
      if (p.cos_sin) rotate<E>(angles, static_cast<int>(p.rotary_dim) / 2, whole, lane, staged[warp], x[h]);
    }
    if (is_query && p.query_scales) scale_head(query_scale, x[h]);
    if (is_query || !p.kv_cache)
      store_head<T, E, kFull>(source_of<T>(p, token, head), lane, p.head_dim, x[h]);
    else
      store_cached<C, E, kFull>(p, head, key, lane, x[h]);
  }
}

// What a thread has of a head that turns as a whole: W elements of the first half, and those that they turn
// with.
template <class T, int W>
struct Halves {
  Packed<T, W> low, high;

  __device__ __forceinline__ void unpack_to(float (&x)[W], float (&y)[W]) const {
    unpack<T, W>(low, x);
    unpack<T, W>(high, y);
  }
};

template <class T, int W>
__device__ __forceinline__ Halves<T, W> load_halves(const T* from, int half) {
  return {load_packed<T, W>(from), load_packed<T, W>(from + half)};
}

template <class T, int W>
__device__ __forceinline__ void store_halves(T* to, int half, const float (&x)[W], const float (&y)[W]) {
  store_vector<T, W>(to, x);
  store_vector<T, W>(to + half, y);
}

// 1 over the root of the mean of a head's squares, which neighbouring threads have. By whole warps.
template <class T, int W, int E>
__device__ __forceinline__ float norm_scale(const Halves<T, W>& head, const QkvParams& p) {
  float x[W], y[W];
  head.unpack_to(x, y);
  return rsqrtf(spread_squares<W, E == 0 ? W : E>(x, y) / static_cast<float>(p.head_dim) + p.eps);
}

// Rotation of whole heads. Nothing crosses lanes but the squares of a norm, and a thread has the same part of
// kHeads heads, whose angles are loaded once. E: the elements that a lane has of a head where a warp has all
// of it (`prepare_qkv_kernel`), whose order of additions the norm here keeps; 0: no norm, heads of any size.
template <class T, class C, int W, int E, int kHeads>
__global__ void __launch_bounds__(kTurnThreads) turn_kernel(const QkvParams p) {
  let_next_start();
  constexpr int kNormed = E > 0 ? kHeads : 0;
  const int half = static_cast<int>(p.head_dim) / 2;
  const int parts = E > 0 ? 16 * E / W : half / W;
  const int step = static_cast<int>(blockDim.x) / parts;  // heads of the block at once
  const int at = static_cast<int>(threadIdx.x) % parts * W;
  const int first = static_cast<int>(blockIdx.y) * step * kHeads + static_cast<int>(threadIdx.x) / parts;
  const int end = static_cast<int>(p.q_heads + (p.kv_cache ? 2 : 1) * p.k_heads);
  const int64_t token = blockIdx.x;
  const int64_t slot = p.kv_cache ? p.slots[token] : -1;
  const float* const angles = p.cos_sin + p.positions[token] * p.rotary_dim + at;
  float cosine[W], sine[W];
  load_angles<W>(angles, cosine);
  load_angles<W>(angles + half, sine);
  const int64_t key = slot >= 0 ? first_key(p, slot) : 0;
  const float query_scale = p.query_scales ? __ldg(p.query_scales + p.positions[token]) : 1.0f;
  Halves<T, W> weights[kHeads], heads[kHeads] = {};
#pragma unroll
  for (int h = 0; h < kNormed; ++h) {
    const void* const weight = first + h * step < p.q_heads ? p.q_weight : p.k_weight;
    weights[h] = load_halves<T, W>(static_cast<const T*>(weight) + at, half);
  }
  wait_for_previous();
#pragma unroll
  for (int h = 0; h < kHeads; ++h)
    if (first + h * step < end)
      heads[h] = load_halves<T, W>(source_of<T>(p, token, head_of(p, first + h * step)) + at, half);
  float scales[kHeads];
#pragma unroll
  for (int h = 0; h < kNormed; ++h) scales[h] = norm_scale<T, W, E>(heads[h], p);
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (first + h * step >= end) return;
    const Head head = head_of(p, first + h * step);
    const bool is_query = head.kind == HeadKind::kQuery, is_stored = p.kv_cache && !is_query;
    if (is_stored && slot < 0) return;  // keys and values come last
    float x[W], y[W];
    heads[h].unpack_to(x, y);
    if (E > 0 && head.kind != HeadKind::kValue) {
      weigh<T, W>(weights[h].low, p.weight_offset, scales[h], x);
      weigh<T, W>(weights[h].high, p.weight_offset, scales[h], y);
    }
    if (head.kind != HeadKind::kValue) turn<W>(cosine, sine, x, y);
    if (is_query && p.query_scales) scale_head(query_scale, x), scale_head(query_scale, y);
    if (is_stored) {
      scale_for_cache<C>(p, head, x);
      scale_for_cache<C>(p, head, y);
      store_halves<C, W>(cached<C>(p, head, key) + at, half, x, y);
    } else {
      store_halves<T, W>(source_of<T>(p, token, head) + at, half, x, y);
    }
  }
}

// Whether all of a head turns, in vectors of W.
template <class T, class C, int W>
bool turns_whole(const QkvParams& p) {
  constexpr size_t kBytes = W * sizeof(T);
  return p.cos_sin && p.rotary_dim == p.head_dim && p.head_dim % (2 * W) == 0 && is_aligned(p.q, kBytes) &&
         is_aligned(p.k, kBytes) && is_aligned(p.v, kBytes) && is_aligned(p.cos_sin, 16) &&
         is_aligned(p.kv_cache, W * sizeof(C)) && p.q_stride % W == 0 && p.k_stride % W == 0 &&
         p.v_stride % W == 0 && is_aligned(p.q_weight, kBytes) && is_aligned(p.k_weight, kBytes);
}

// The heads of a token are dealt to as few blocks as have room for them, in equal parts.
template <class T, class C, int W, int E>
void launch_turns(const QkvParams& p, Stream stream) {
  constexpr int kHeads = 2;
  const int64_t parts = p.head_dim / (2 * W);  // threads of a head
  const int64_t most = kTurnThreads / parts;   // heads at once
  const int64_t num_heads = p.q_heads + (p.kv_cache ? 2 : 1) * p.k_heads;
  const int64_t blocks = ceil_div(num_heads, most * kHeads), heads = ceil_div(num_heads, blocks * kHeads);
  // Whole warps add squares up.
  const int64_t threads = E > 0 ? round_up(heads * parts, kWarp) : heads * parts;
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(p.num_tokens), static_cast<unsigned>(blocks)),
                          .block = static_cast<unsigned>(threads),
                          .overlaps_previous = true};
  launch(turn_kernel<T, C, W, E, kHeads>, shape, stream, p);
}

// Whether there was a kernel for it. Those with a norm are for heads of 64 and 128, in bfloat16 of 256, too.
template <class T, class C>
bool try_turns(const QkvParams& p, Stream stream) {
  constexpr int kWide = kVectorWidth<T>;
  if (!turns_whole<T, C, kWide>(p)) return false;
  if (!p.q_weight)
    launch_turns<T, C, kWide, 0>(p, stream);
  else if (p.head_dim == 2 * kWarp)
    launch_turns<T, C, kWide, 2>(p, stream);
  else if (p.head_dim == 4 * kWarp)
    launch_turns<T, C, kWide, 4>(p, stream);
  else if (kWide >= 8 && p.head_dim == 8 * kWarp)
    launch_turns<T, C, kWide, kWide>(p, stream);
  else
    return false;
  return true;
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
  if (p.num_tokens < kManyTokens) return launch_heads<T, C, E, 1>(p, stream);
  launch_heads<T, C, E, 4>(p, stream);
}

template <class T, class C>
void launch_head_dim(const QkvParams& p, Stream stream) {
  const bool leaves_lanes_idle = p.head_dim % kWarp != 0 && !p.kv_cache;
  if ((leaves_lanes_idle || p.num_tokens >= kManyTokens) && try_turns<T, C>(p, stream)) return;
  if (p.head_dim <= 32) return launch_elements<T, C, 1>(p, stream);
  if (p.head_dim <= 64) return launch_elements<T, C, 2>(p, stream);
  if (p.head_dim <= 128) return launch_elements<T, C, 4>(p, stream);
  if (p.head_dim <= 256) return launch_elements<T, C, 8>(p, stream);
  return launch_heads<T, C, 16, 1>(p, stream);  // one head has as many bytes as four of the others
}

}  // namespace

void prepare_qkv(const QkvParams& p, Stream stream) {
  check(p.head_dim >= 1 && p.head_dim <= kMaxHeadDim, "prepare_qkv: head dim outside [1, 512]");
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
