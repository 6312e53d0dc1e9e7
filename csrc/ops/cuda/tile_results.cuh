// From the sums of the warps of tile_linear.cuh to the results of a product.
#pragma once

#include "core/dtype.h"
#include "device/cluster.cuh"
#include "device/launch.cuh"
#include "device/vectors.cuh"
#include "ops/cuda/activation.cuh"
#include "ops/cuda/skinny_linear.h"
#include "ops/cuda/tile_sums.cuh"

namespace bequest::cuda::tiles {

// Of the CTAs that share an output: a cluster, or one alone.
__device__ __forceinline__ void sync_parts() {
  if (gridDim.x == 1) return __syncthreads();
  publish_in_cluster();
  await_published();
}

// Leaves what a warpgroup has summed in its slice's part.
template <class Size, bool kNorm>
__device__ __forceinline__ void leave(const Sums<Size, kNorm>& sums, float* parts, float* squares) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp % 4, warpgroup = threadIdx.x / kWarpgroup;
  const int reader = warpgroup % Size::kReaders, slice = warpgroup / Size::kReaders;
  float* part =
      parts + slice * (Size::kPartBytes / 4) + reader * (Size::kHeight * kGroupRows) + warp * 16 + lane / 4;
#pragma unroll
  for (int height = 0; height < Size::kHeight; ++height)
#pragma unroll
    for (int i = 0; i < Size::kSums; ++i)
      part[(i / 4 * kTile + lane % 4 * 2 + i % 2) * Size::kPitch + height * kGroupRows + i / 2 % 2 * 8] =
          sums.of[height][i];
  if constexpr (kNorm) {
#pragma unroll
    for (int i = 0; i < sums.kSquares; ++i) {
      float sum = sums.square[i];
#pragma unroll
      for (int distance = 4; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
      const int token = reader * 16 + threadIdx.x % kWarpgroup / 8 + i * sums.kGroups;
      if (lane % 8 == 0 && token < Size::kTokens) squares[slice * Size::kTokens + token] = sum;
    }
  }
}

// Adds the slices of a CTA, always in the same order, to the first. By the whole block.
template <class Size>
__device__ __forceinline__ void add_slices(float* parts, float* squares, int tokens, bool normed) {
  constexpr int kPart = Size::kPartBytes / 4;
  if constexpr (Size::kSlices > 1) {
#pragma unroll 1
    for (int i = threadIdx.x; i < tokens * (Size::kRows / 4); i += kThreads) {
      auto* at =
          reinterpret_cast<float4*>(parts + i / (Size::kRows / 4) * Size::kPitch + i % (Size::kRows / 4) * 4);
      float4 sum = *at;
#pragma unroll
      for (int slice = 1; slice < Size::kSlices; ++slice) {
        const float4 part = at[slice * (kPart / 4)];
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
      *at = sum;
    }
    if (normed && threadIdx.x < Size::kTokens)
#pragma unroll
      for (int slice = 1; slice < Size::kSlices; ++slice)
        squares[threadIdx.x] += squares[slice * Size::kTokens + threadIdx.x];
  }
}

// The outputs of a CTA, two of a token to a thread at a time: [tokens, outputs of a tile / 2], dealt to the
// threads of the cluster.
template <class Size>
class Results {
 public:
  __device__ Results(const SkinnyLinearParams& p, int tile, int block, uint32_t parts, uint32_t squares)
      : p_(p),
        parts_(parts),
        squares_(squares),
        gated_(p.result == SkinnyResult::kGate),
        pairs_(gated_ ? Size::kRows / 4 : Size::kRows / 2),
        first_token_(block * Size::kTokens),
        tokens_(min(p.num_tokens - first_token_, Size::kTokens)),
        stride_(static_cast<int>(gated_ ? p.out_features / 2 : p.out_features)),
        first_output_(tile * pairs_ * 2),
        begin_(static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x)) {}

  __device__ int num_tokens() const { return tokens_; }

  // Early: what the thread's first results are added to. Memory is several hundred clocks away, too far for
  // each result.
  __device__ __forceinline__ uint32_t begin() const {
    if (p_.result != SkinnyResult::kAdd || begin_ >= tokens_ * pairs_ || output(begin_) >= stride_) return 0;
    return __ldcg(place(begin_));
  }

  __device__ __forceinline__ void store(uint32_t first_before) const {
    const int step = static_cast<int>(gridDim.x) * kThreads;
    uint32_t next_before = first_before;
#pragma unroll 1
    for (int i = begin_; i < tokens_ * pairs_; i += step) {
      const int token = i / pairs_, at = output(i);
      const uint32_t before = next_before;
      if (p_.result == SkinnyResult::kAdd && i + step < tokens_ * pairs_ && output(i + step) < stride_)
        next_before = __ldcg(place(i + step));
      if (at >= stride_) continue;
      const float norm = scale_of(token);
      float2 value = finished(token, i % pairs_ * 2, at, norm);
      if (gated_) {
        const float2 up = finished(token, Size::kRows / 2 + i % pairs_ * 2, stride_ + at, norm);
        value = {gate(p_.activation, value.x, up.x), gate(p_.activation, value.y, up.y)};
      }
      *place(i) =
          pack(value.x + __uint_as_float(before << 16), value.y + __uint_as_float(before & 0xffff0000u));
    }
  }

 private:
  __device__ __forceinline__ int output(int i) const { return first_output_ + i % pairs_ * 2; }
  __device__ __forceinline__ uint32_t* place(int i) const {
    const int64_t at = int64_t{first_token_ + i / pairs_} * stride_ + output(i);
    return reinterpret_cast<uint32_t*>(static_cast<BFloat16*>(p_.out) + at);
  }

  // The sums of two neighbours of W's rows, scaled, with their bias, rounded. row: in the tile; at: in W
  __device__ __forceinline__ float2 finished(int token, int row, int at, float norm) const {
    const uint32_t mine = parts_ + (token * Size::kPitch + row) * 4;
    float2 sum{}, part[kMostSplits];
    // All are asked for before one is waited for: each is several hundred clocks away.
#pragma unroll
    for (int split = 0; split < kMostSplits; ++split)
      if (split < static_cast<int>(gridDim.x))
        part[split] = load_two_in_cluster(address_in_block(mine, split));
#pragma unroll
    for (int split = 0; split < kMostSplits; ++split)
      if (split < static_cast<int>(gridDim.x)) sum.x += part[split].x, sum.y += part[split].y;
    float2 scale{norm, norm};
    if (p_.scales != nullptr) {
      const float2 rows = __ldg(reinterpret_cast<const float2*>(p_.scales + at));
      scale.x *= rows.x, scale.y *= rows.y;
    }
    sum.x *= scale.x, sum.y *= scale.y;
    if (p_.bias != nullptr) {
      const uint32_t bias =
          __ldg(reinterpret_cast<const uint32_t*>(static_cast<const BFloat16*>(p_.bias) + at));
      sum.x += __uint_as_float(bias << 16), sum.y += __uint_as_float(bias & 0xffff0000u);
    }
    return {rounded<BFloat16>(sum.x), rounded<BFloat16>(sum.y)};
  }

  // What a token's results are multiplied by: what the norm comes to.
  __device__ __forceinline__ float scale_of(int token) const {
    if (p_.norm_weight == nullptr) return 1;
    float square = 0, part[kMostSplits];
#pragma unroll
    for (int split = 0; split < kMostSplits; ++split)
      if (split < static_cast<int>(gridDim.x))
        part[split] = load_in_cluster(address_in_block(squares_ + token * 4, split));
#pragma unroll
    for (int split = 0; split < kMostSplits; ++split)
      if (split < static_cast<int>(gridDim.x)) square += part[split];
    return rsqrtf(square / static_cast<float>(p_.in_features) + p_.eps);
  }

  const SkinnyLinearParams& p_;
  const uint32_t parts_, squares_;
  const bool gated_;
  const int pairs_, first_token_, tokens_, stride_, first_output_, begin_;
};

}  // namespace bequest::cuda::tiles
