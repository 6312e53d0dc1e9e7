// A query, key or value head between the projection and the attention, in the registers of one warp: the norm
// is a warp reduction, and the rotation meets its partner dimension, which may be any lane's, by a shuffle or
// through shared memory.
#pragma once

#include "device/reductions.cuh"
#include "device/vectors.cuh"
#include "ops/cuda/rope.h"

namespace bequest::cuda {

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
  float sine[E];
  // Of all sines: x * cosine + partner * sign * sine. Not multiplied where they are read, because who
  // multiplies them waits for them.
  float sign = 1.0f;

  // `whole`: all elements turn, and a lane's are all in one half.
  __device__ Angles(const QkvParams& p, int64_t token, int lane, bool whole) {
    const int half = static_cast<int>(p.rotary_dim) / 2;
    const float* table = p.cos_sin ? p.cos_sin + p.positions[token] * p.rotary_dim : nullptr;
    if (table && whole) {
      sign = lane < kWarp / 2 ? -1.0f : 1.0f;
      // Lanes read neighbouring vectors: element by element each load would touch all of the table's row.
      constexpr int kWide = E < 4 ? E : 4;
      const float* mine = table + (lane % (kWarp / 2)) * E;
#pragma unroll
      for (int i = 0; i < E; i += kWide) {
        load_constant<float, kWide>(mine + i, reinterpret_cast<float (&)[kWide]>(cosine[i]));
        load_constant<float, kWide>(mine + half + i, reinterpret_cast<float (&)[kWide]>(sine[i]));
      }
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
  for (int i = 0; i < E; ++i) x[i] = x[i] * angles.cosine[i] + partner[i] * (angles.sign * angles.sine[i]);
}

template <int W>
__device__ __forceinline__ void load_angles(const float* from, float (&to)[W]) {
#pragma unroll
  for (int i = 0; i < W; i += 4) load_constant<float, 4>(from + i, reinterpret_cast<float (&)[4]>(to[i]));
}

// The same of x, and of its partners y.
template <int W>
__device__ __forceinline__ void turn(const float (&cosine)[W], const float (&sine)[W], float (&x)[W],
                                     float (&y)[W]) {
#pragma unroll
  for (int i = 0; i < W; ++i) {
    const float turned = x[i] * cosine[i] + y[i] * -sine[i];
    y[i] = y[i] * cosine[i] + x[i] * sine[i];
    x[i] = turned;
  }
}

// The squares of a head of 32 E elements: 16 E / W neighbouring lanes have W each of the first half, x, and
// of the second one, y. They are added in the order of `normalise`, so the sum is the same to the bit.
// REQUIRES: E divides W; the whole warp is here
template <int W, int E>
__device__ __forceinline__ float spread_squares(const float (&x)[W], const float (&y)[W]) {
  constexpr int kGroups = W / E;  // of elements that one lane has there
  float sums[kGroups];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    float low = 0, high = 0;
#pragma unroll
    for (int i = g * E; i < (g + 1) * E; ++i) low += x[i] * x[i], high += y[i] * y[i];
    sums[g] = low + high;
  }
#pragma unroll
  for (int distance = 8 / kGroups; distance > 0; distance /= 2)
#pragma unroll
    for (float& sum : sums) sum += __shfl_xor_sync(kAllLanes, sum, distance);
#pragma unroll
  for (int distance = kGroups / 2; distance > 0; distance /= 2)
#pragma unroll
    for (int g = 0; g < distance; ++g) sums[g] += sums[g + distance];
  return sums[0];
}

// Elements of a head behind its norm, as `normalise` has them.
template <class T, int W>
__device__ __forceinline__ void weigh(const Packed<T, W>& weight, float offset, float scale, float (&x)[W]) {
  float factors[W];
  unpack<T, W>(weight, factors);
#pragma unroll
  for (int i = 0; i < W; ++i) x[i] = rounded<T>(x[i] * scale * (factors[i] + offset));
}

template <int E>
__device__ __forceinline__ void scale_head(float scale, float (&x)[E]) {
#pragma unroll
  for (float& each : x) each *= scale;
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

// Where the cache has a key or value head; `key` is that of the token's head 0.
template <class C>
__device__ __forceinline__ C* cached(const QkvParams& p, const Head& head, int64_t key) {
  C* const to = static_cast<C*>(p.kv_cache) + key + p.layout.keys(0, head.index);
  return head.kind == HeadKind::kValue ? to + p.layout.values_after_keys() : to;
}

template <class C, int W>
__device__ __forceinline__ void scale_for_cache(const QkvParams& p, const Head& head, float (&x)[W]) {
  if constexpr (std::is_same_v<C, Float8>) {
    scale_head(head.kind == HeadKind::kValue ? p.value_factor : p.key_factor, x);
  }
}

// A key or value head to its place in the cache.
template <class C, int E, bool kFull>
__device__ __forceinline__ void store_cached(const QkvParams& p, const Head& head, int64_t key, int lane,
                                             float (&x)[E]) {
  scale_for_cache<C>(p, head, x);
  store_head<C, E, kFull>(cached<C>(p, head, key), lane, p.head_dim, x);
}

}  // namespace bequest::cuda
