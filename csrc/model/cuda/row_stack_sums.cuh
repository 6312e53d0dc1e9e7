// How blocks tell each other what they have made: within a cluster by writing to shared memory, between
// clusters by words in the L2.
#pragma once

#include <type_traits>

#include "device/cluster.cuh"
#include "device/exchange.cuh"
#include "device/pairs.cuh"
#include "device/tensor_core.cuh"
#include "model/cuda/row_stack_feed.cuh"

namespace bequest::cuda::stack {

// To what lies at the place of `mine` in block `to` of the cluster, whose `there` counts the bytes.
template <class V>
__device__ __forceinline__ void send(V* mine, PhaseBarrier& there, int to, const V& value) {
  const uint32_t at = address_in_block(shared_address(mine), to);
  const uint32_t barrier = address_in_block(there.address(), to);
  if constexpr (std::is_same_v<V, float>)
    send_async(at, __float_as_uint(value), barrier);
  else
    send_async(at, value, barrier);
}

__device__ __forceinline__ void sync_consumers() { sync_threads<1, kConsumers>(); }

__device__ __forceinline__ float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// Where a lane reads a tile, as load_matrices wants it: see device/tensor_core.cuh.
__device__ __forceinline__ uint32_t rows_first_offset(int lane) {
  return panel_offset((lane >> 3 & 1) * 8 + (lane & 7), lane >> 4);
}
__device__ __forceinline__ uint32_t columns_first_offset(int lane) {
  return panel_offset((lane >> 4) * 8 + (lane & 7), lane >> 3 & 1);
}

// A tile of W in registers: kSteps of 16 columns.
struct Fragments {
  uint32_t w[8][4];

  // `address`: its lane's offset included
  template <int kSteps = 8>
  __device__ __forceinline__ void load(uint32_t address) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) load_matrices(w[s], (address + s / 4 * kPanelBytes) ^ (32 * (s % 4)));
  }
};

// sums += W x, of whose columns the pairs are in x. The sums of a row are in four parts, in the lanes that
// are multiples of four: [0] and [2] of each.
using TileSums = float[4][4];
template <int kSteps = 8>
__device__ __forceinline__ void multiply(TileSums& sums, const Fragments& tile, const uint32_t* x) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) multiply_accumulate(sums[s % 4], tile.w[s], x[2 * s], x[2 * s + 1]);
}

// What a lane has of a tile of x: 16 pairs; those of all columns of the product but the first are zero.
__device__ __forceinline__ void load_pairs(uint32_t* x, const uint32_t* words, int lane) {
#pragma unroll
  for (int i = 0; i < 16; i += 4) {
    const uint4 four = lane < 4 ? *reinterpret_cast<const uint4*>(words + lane * 16 + i) : uint4{};
    x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
  }
}

__device__ __forceinline__ float first_row(const TileSums& sums) {
  return (sums[0][0] + sums[1][0]) + (sums[2][0] + sums[3][0]);
}
__device__ __forceinline__ float second_row(const TileSums& sums) {
  return (sums[0][2] + sums[1][2]) + (sums[2][2] + sums[3][2]);
}

// The columns of one warp: a lane has two of them, and there are kSame lanes for each two.
template <int A>
class Columns {
 public:
  __device__ Columns(const Arguments& a, Shared<A>& shared, int warp, int lane)
      : a_(a),
        shared_(shared),
        warp_(warp),
        lane_(lane),
        first_((place_.rank * kWarps + warp) * A * kTileRows),
        mine_(first_ + lane % kPairs * 2),
        residual_(reinterpret_cast<const uint32_t*>(a.residual)[mine_ / 2]) {}

  // Asks for what the next product multiplies them by: it comes from far.
  __device__ __forceinline__ void ask_for(const BFloat16* gains) {
    asm volatile("ld.global.nc.b32 %0, [%1];"
                 : "=r"(gain_)
                 : "l"(reinterpret_cast<const uint32_t*>(gains) + mine_ / 2));
  }

  // Leaves this cluster's part of the sums of `writer`: of a tile's rows.
  __device__ __forceinline__ void leave(Writer writer, uint32_t number, int tile,
                                        const TileSums& sums) const {
    uint2* const to = words(writer, number) + place_.cluster * kHidden + first_ + tile * kTileRows;
    if (lane_ % 4) return;
    store(to + lane_ / 4, first_row(sums), number);
    store(to + lane_ / 4 + 8, second_row(sums), number);
  }

  // Adds all clusters' parts to the residual. num: of clusters that have one
  __device__ __forceinline__ void add_parts(Writer writer, uint32_t number, int num) {
    const uint2* const from = words(writer, number) + mine_;
    uint64_t parts[kParts][2];  // each in one access
    Patience patience;
    for (bool all = false; !all; patience.spend()) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        parts[i][0] = parts[i][1] = static_cast<uint64_t>(number) << 32;
        const int cluster = i * kSame + lane_ / kPairs;
        if (cluster < num) load_relaxed(parts[i], from + cluster * kHidden);
      }
      all = true;
#pragma unroll
      for (int i = 0; i < kParts; ++i)
        all = all && parts[i][0] >> 32 == number && parts[i][1] >> 32 == number;
    }
    __syncwarp();
    float low = 0, high = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      low += __uint_as_float(static_cast<uint32_t>(parts[i][0]));
      high += __uint_as_float(static_cast<uint32_t>(parts[i][1]));
    }
#pragma unroll
    for (int distance = kPairs; distance < kWarp; distance *= 2) {
      low += __shfl_xor_sync(kAllLanes, low, distance);
      high += __shfl_xor_sync(kAllLanes, high, distance);
    }
    residual_ = pack(low_of(residual_) + low, high_of(residual_) + high);
  }

  // By the warps of one cluster.
  __device__ __forceinline__ void store_residual(BFloat16* to) const {
    if (lane_ < kPairs) reinterpret_cast<uint32_t*>(to)[mine_ / 2] = residual_;
  }

  // What product `reader` reads of them goes to all blocks of the cluster, times what was asked for.
  __device__ __forceinline__ void send_to(Reader reader) const {
    const int pair = warp_ * kPairs + lane_ % kPairs;
    const float low = low_of(residual_), high = high_of(residual_);
    const uint32_t word = pack(low * low_of(gain_), high * high_of(gain_));
    uint32_t* const to =
        &shared_.x[reader][place_.rank][pair / kTileWords * kTileWords + place_of_pair(pair % kTileWords)];
    PhaseBarrier& there = shared_.x_there[reader][place_.rank];
#pragma unroll
    for (int i = 0; i < kCluster; i += kSame) send(to, there, i + lane_ / kPairs, word);
    float square = low * low + high * high;
#pragma unroll
    for (int distance = 1; distance < kPairs; distance *= 2)
      square += __shfl_xor_sync(kAllLanes, square, distance);
    if (lane_ < kCluster) send(&shared_.squares[reader][place_.rank][warp_], there, lane_, square);
  }

 private:
  static constexpr int kHidden = 1024 * A;
  static constexpr int kPairs = A * kTileRows / 2;
  static constexpr int kSame = kWarp / kPairs;
  static constexpr int kParts = kMostClusters / kSame;

  // Those of the layer before are kept: a cluster may still read them.
  __device__ __forceinline__ uint2* words(Writer writer, uint32_t number) const {
    return a_.words + (writer * 2 + number % 2) * kMostClusters * kHidden;
  }
  __device__ static __forceinline__ void store(uint2* to, float value, uint32_t number) {
    store_relaxed(reinterpret_cast<uint64_t*>(to),
                  static_cast<uint64_t>(number) << 32 | __float_as_uint(value));
  }

  const Arguments& a_;
  Shared<A>& shared_;
  const Place place_;
  const int warp_, lane_;
  const int first_, mine_;
  uint32_t residual_, gain_ = 0;
};

// A product over hidden columns, whose rows are `num` tiles: leaves the parts of their sums. Returns 1 / rms.
template <int A>
__device__ __forceinline__ float multiply_hidden(Shared<A>& shared, Tiles& tiles, Reader reader, int num,
                                                 uint32_t parity, float eps, int warp, int lane,
                                                 uint32_t lane_offset) {
  Fragments tile;
  tile.load(tiles.await() + lane_offset);
  uint32_t x[A][16];
  PhaseBarrier& there = shared.x_there[reader][warp];
  there.wait(parity);
  if (lane == 0) there.arrive_expecting(kSliceBytes<A>);
#pragma unroll
  for (int t = 0; t < A; ++t) load_pairs(x[t], shared.x[reader][warp] + t * kTileWords, lane);
  float square = shared.squares[reader][warp][lane % kWarps];
  for (int i = 0; i < num; ++i) {
    TileSums sums{};
#pragma unroll
    for (int t = 0; t < A; ++t) {
      multiply(sums, tile, x[t]);
      tiles.give_back(lane);
      if (t + 1 < A || i + 1 < num) tile.load(tiles.await() + lane_offset);
    }
    if (lane % 4 == 0) {
      float* const to = &shared.sums[reader][warp][i * kTileRows + lane / 4];
      to[0] = first_row(sums);
      to[8] = second_row(sums);
    }
  }
#pragma unroll
  for (int distance = 1; distance < kWarps; distance *= 2)
    square += __shfl_xor_sync(kAllLanes, square, distance);
  if (lane == 0) shared.square_sums[reader][warp] = square;
  sync_consumers();
  float total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += shared.square_sums[reader][w];
  return rsqrtf(total / (1024.0f * A) + eps);
}

// The sums of two neighbouring rows.
template <int A>
__device__ __forceinline__ float2 sum_parts(const Shared<A>& shared, Reader reader, int row) {
  float2 total{};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float2 part = *reinterpret_cast<const float2*>(&shared.sums[reader][w][row]);
    total.x += part.x, total.y += part.y;
  }
  return total;
}

}  // namespace bequest::cuda::stack
