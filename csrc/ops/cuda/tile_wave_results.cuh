// From the sums of the warpgroups of tile_wave.cuh to the results of a product.
#pragma once

#include "core/dtype.h"
#include "device/cluster.cuh"
#include "device/launch.cuh"
#include "device/vectors.cuh"
#include "ops/cuda/activation.cuh"
#include "ops/cuda/skinny_linear.h"
#include "ops/cuda/tile_sums.cuh"

namespace bequest::cuda::tiles {

inline constexpr int kWaveThreads = kThreads + kWarp;  // the last warp asks for stages
inline constexpr int kMostWaveSplits = 4;
// k is divided in twos of lines, so that results do not depend on how many a stage has.
inline constexpr int kPieceLines = 2;

// kTileRows rows of W against up to kMostTokens, 64 or 128; stages of kStageLines times 128 bytes of each.
template <int kTileRows, int kStageLines, int kMostTokens>
struct WaveSizes {
  static constexpr int kRows = kTileRows, kLines = kStageLines, kTokens = kMostTokens;
  // Warpgroups share 64 tokens and divide W, or have 64 tokens each.
  static constexpr bool kDividesTokens = kTokens > 64;
  static constexpr int kColumns = kDividesTokens ? kRows : kRows / kWarpgroups;  // of a product: rows of W
  static constexpr int kSums = kColumns / 2;                                     // of a lane
  static constexpr int kWeightBytes = kRows * kLineBytes;                        // of a line
  // Floats of a token's sums: those stored at once are in other banks.
  static constexpr int kPitch = kRows + 8;
  static constexpr int kPartBytes = kTokens * kPitch * 4;
  static_assert(kRows % 16 == 0 && kPieceLines % kLines == 0);

  // Of a warpgroup's product.
  __device__ static __forceinline__ int first_token() {
    return kDividesTokens ? static_cast<int>(threadIdx.x) / kWarpgroup * 64 : 0;
  }
  __device__ static __forceinline__ int first_row() {
    return kDividesTokens ? 0 : static_cast<int>(threadIdx.x) / kWarpgroup * kColumns;
  }
};

// What a CTA has.
struct WaveTile {
  const int index, split, splits;
  const bool gated;
  Piece piece;  // in stages

  // lines: of a stage
  __device__ WaveTile(const SkinnyLinearParams& p, int lines)
      : index(static_cast<int>(blockIdx.y)),
        split(static_cast<int>(blockIdx.x)),
        splits(static_cast<int>(gridDim.x)),
        gated(p.result == SkinnyResult::kGate),
        piece(static_cast<int>(ceil_div(p.in_features, kPieceLines * kLineBytes)), split, splits) {
    piece.first *= kPieceLines / lines;
    piece.count *= kPieceLines / lines;
  }
};

// What sums are multiplied by, and what is added to them.
template <class Size>
struct WaveFactors {
  float of_tokens[Size::kTokens];
  float2 of_rows[Size::kRows / 2], biases[Size::kRows / 2];

  __device__ __forceinline__ void load_rows(const SkinnyLinearParams& p, const WaveTile& tile) {
#pragma unroll 1
    for (int i = threadIdx.x; i < Size::kRows / 2; i += kWaveThreads) {
      const int row = row_in_weight(p, tile, i * 2);
      const bool exists = row < p.out_features;
      of_rows[i] = exists ? __ldg(reinterpret_cast<const float2*>(p.scales + row)) : float2{};
      const uint32_t bias =
          exists && p.bias != nullptr
              ? __ldg(reinterpret_cast<const uint32_t*>(static_cast<const BFloat16*>(p.bias) + row))
              : 0;
      biases[i] = {__uint_as_float(bias << 16), __uint_as_float(bias & 0xffff0000u)};
    }
  }
  // Behind wait_for_previous.
  __device__ __forceinline__ void load_tokens(const SkinnyLinearParams& p) {
    const int token = static_cast<int>(threadIdx.x);
    if (token < p.num_tokens) of_tokens[token] = __ldcg(p.x_scales + token);
  }

  // The sums of a token of two neighbours of W's rows, rounded. row: in the tile
  __device__ __forceinline__ float2 finished(float first, float second, float token, int row) const {
    const float2 factor = of_rows[row / 2], bias = biases[row / 2];
    return {rounded<BFloat16>(first * (token * factor.x) + bias.x),
            rounded<BFloat16>(second * (token * factor.y) + bias.y)};
  }

 private:
  // Where rows `row` and `row` + 1 of a tile are in W, or its end. Of a gated product two of the gate and the
  // same two of up take turns.
  __device__ static __forceinline__ int row_in_weight(const SkinnyLinearParams& p, const WaveTile& tile,
                                                      int row) {
    if (!tile.gated) return tile.index * Size::kRows + row;
    const int half = static_cast<int>(p.out_features) / 2, at = tile.index * (Size::kRows / 2) + row / 4 * 2;
    return at < half ? at + row / 2 % 2 * half : 2 * half;
  }
};

// Leaves what a warpgroup has summed where the cluster finds it.
template <class Size>
__device__ __forceinline__ void leave(const float (&sums)[Size::kSums], float* parts) {
  const int lane = threadIdx.x % kWarp, token = Size::first_token() + threadIdx.x / kWarp % 4 * 16 + lane / 4;
  float* part = parts + token * Size::kPitch + Size::first_row() + lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < Size::kColumns / kTile; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2*>(part + half * 8 * Size::kPitch + n * kTile) = {sums[n * 4 + half * 2],
                                                                                sums[n * 4 + half * 2 + 1]};
}

template <class Size>
class WaveResults {
 public:
  static constexpr int kItems = 3;  // fours of sums that a thread finishes at once
  using Residual = uint2[kItems];

  __device__ WaveResults(const SkinnyLinearParams& p, const WaveFactors<Size>& factors, const WaveTile& tile)
      : p_(p),
        factors_(factors),
        tile_(tile),
        adds_(p.result == SkinnyResult::kAdd),
        stride_(static_cast<int>(tile.gated ? p.out_features / 2 : p.out_features)),
        first_output_(tile.index * (tile.gated ? Size::kRows / 2 : Size::kRows)) {}

  // What the thread's results from item `first` on are added to: memory is several hundred clocks away.
  __device__ __forceinline__ void load_residual(int first, Residual& before) const {
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const Item item = item_of(first + k);
      before[k] = {0, 0};
      if (adds_ && item.exists)
        before[k] = __ldcg(reinterpret_cast<const uint2*>(place(item.token, item.output)));
    }
  }

  // Of a CTA that has all of k, from its registers.
  __device__ __forceinline__ void store(const float (&sums)[Size::kSums]) const {
    if (!tile_.gated)
      return store_each(sums, [&](const auto& values, int token, int row) { store_two(values, token, row); });
    // A choice of activation for each result would keep them from overlapping.
    if (p_.activation == Activation::kSilu)
      return store_each(sums, [&](const auto& values, int token, int row) {
        store_gated(values, token, row,
                    [](float x, float up) { return activate<Activation::kSilu>(x) * up; });
      });
    store_each(sums, [&](const auto& values, int token, int row) {
      store_gated(values, token, row, [&](float x, float up) { return rarely_gate(p_.activation, x, up); });
    });
  }

  // Of the CTAs of a cluster: each adds the parts of some fours, always in the same order. Arrives when it
  // has read all parts.
  __device__ __forceinline__ void store_parts(uint32_t parts, Residual& before) const {
    const int count =
        (Size::kTokens * (Size::kRows / 4) + tile_.splits * kThreads - 1) / (tile_.splits * kThreads);
#pragma unroll 1
    for (int first = 0; first < count; first += kItems) {
      if (first > 0) load_residual(first, before);
      float4 sums[kItems];
      load_sums(parts, first, sums);
      if (first + kItems >= count) publish_in_cluster();
#pragma unroll
      for (int k = 0; k < kItems; ++k) store_four(item_of(first + k), sums[k], before[k]);
    }
  }

 private:
  // Four sums of a token. row: in the tile
  struct Item {
    int token, row, output;
    bool exists;
  };
  __device__ __forceinline__ Item item_of(int k) const {
    const int i = (k * tile_.splits + tile_.split) * kThreads + static_cast<int>(threadIdx.x);
    const int token = i / (Size::kRows / 4), row = i % (Size::kRows / 4) * 4;
    const int output = first_output_ + (tile_.gated ? row / 2 : row);
    return {token, row, output, token < p_.num_tokens && output < stride_};
  }
  __device__ __forceinline__ uint32_t* place(int token, int output) const {
    return reinterpret_cast<uint32_t*>(static_cast<BFloat16*>(p_.out) + int64_t{token} * stride_ + output);
  }
  __device__ static __forceinline__ uint32_t added(const float2& value, uint32_t before) {
    return pack(value.x + __uint_as_float(before << 16), value.y + __uint_as_float(before & 0xffff0000u));
  }

  // store(values, token, row): of two rows of W from `row` on, of `token` and the one 8 further on
  template <class Store>
  __device__ __forceinline__ void store_each(const float (&sums)[Size::kSums], const Store& store) const {
    const int lane = threadIdx.x % kWarp,
              token = Size::first_token() + threadIdx.x / kWarp % 4 * 16 + lane / 4;
    const int first = Size::first_row() + lane % 4 * 2;
    const float low = factors_.of_tokens[token], high = factors_.of_tokens[token + 8];
#pragma unroll
    for (int n = 0; n < Size::kColumns / kTile; ++n) {
      const int row = first + n * kTile;
      const float2 values[2] = {factors_.finished(sums[n * 4], sums[n * 4 + 1], low, row),
                                factors_.finished(sums[n * 4 + 2], sums[n * 4 + 3], high, row)};
      store(values, token, row);
    }
  }

  // An even lane has the gate and its neighbour has up, both of two tokens: each finishes one.
  template <class Gate>
  __device__ __forceinline__ void store_gated(const float2 (&values)[2], int token, int row,
                                              const Gate& gate) const {
    const bool is_up = threadIdx.x % 2 == 1;
    const float2 own = is_up ? values[1] : values[0], given = is_up ? values[0] : values[1];
    const float2 other = {__shfl_xor_sync(kAllLanes, given.x, 1), __shfl_xor_sync(kAllLanes, given.y, 1)};
    const float2 x = is_up ? other : own, up = is_up ? own : other;
    const int output = first_output_ + row / 4 * 2, to = token + (is_up ? 8 : 0);
    const uint32_t result = pack(gate(x.x, up.x), gate(x.y, up.y));
    if (to < p_.num_tokens && output < stride_) *place(to, output) = result;
  }
  __device__ __forceinline__ void store_two(const float2 (&values)[2], int token, int row) const {
    const int output = first_output_ + row;
    if (output >= stride_) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (token + half * 8 >= p_.num_tokens) continue;
      uint32_t* to = place(token + half * 8, output);
      *to = added(values[half], adds_ ? __ldcg(to) : 0);
    }
  }
  __device__ __forceinline__ void store_four(const Item& item, const float4& sum, const uint2& before) const {
    if (!item.exists) return;
    const float token = factors_.of_tokens[item.token];
    const float2 a = factors_.finished(sum.x, sum.y, token, item.row),
                 b = factors_.finished(sum.z, sum.w, token, item.row + 2);
    uint32_t* to = place(item.token, item.output);
    if (tile_.gated)
      *to = pack(gate(p_.activation, a.x, b.x), gate(p_.activation, a.y, b.y));
    else
      *reinterpret_cast<uint2*>(to) = {added(a, before.x), added(b, before.y)};
  }

  // All parts are asked for before one is waited for: each is several hundred clocks away.
  __device__ __forceinline__ void load_sums(uint32_t parts, int first, float4 (&sums)[kItems]) const {
    float4 part[kMostWaveSplits][kItems];
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const Item item = item_of(first + k);
      const uint32_t mine = parts + (min(item.token, Size::kTokens - 1) * Size::kPitch + item.row) * 4;
#pragma unroll
      for (int split = 0; split < kMostWaveSplits; ++split)
        if (split < tile_.splits) part[split][k] = load_four_in_cluster(address_in_block(mine, split));
    }
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      sums[k] = part[0][k];
#pragma unroll
      for (int split = 1; split < kMostWaveSplits; ++split)
        if (split < tile_.splits)
          sums[k] = {sums[k].x + part[split][k].x, sums[k].y + part[split][k].y, sums[k].z + part[split][k].z,
                     sums[k].w + part[split][k].w};
    }
  }

  const SkinnyLinearParams& p_;
  const WaveFactors<Size>& factors_;
  const WaveTile& tile_;
  const bool adds_;
  const int stride_, first_output_;
};

}  // namespace bequest::cuda::tiles
