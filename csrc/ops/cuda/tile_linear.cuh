// The kernel of tile_linear.h.
//
// A CTA has some rows of W and a piece of k; where rows are few, k is divided among the CTAs of a cluster, so
// that all multiprocessors read. The copy engine fills the stages of a ring: 128 bytes of each row of W, and the
// same k of x. It is asked for W before the predecessor has ended. Of the eight warps each has 64 rows of W (32
// beyond 64 tokens) against all tokens, so that x is read from shared memory once for as many, and where that
// leaves warps over, they take turns with the stages. Tensor cores take 16 rows of W against 8
// tokens. Their sums meet at the end, always in the same order: those of the warps in the ring's memory, those
// of the CTAs through the cluster's.
//
// A norm needs no pass of its own: its weight is multiplied into x on the way, the sum of squares is one more
// result, and what it comes to is a factor of the output.
#pragma once

#include <algorithm>

#include "core/dtype.h"
#include "device/barriers.cuh"
#include "device/cluster.cuh"
#include "device/copies.cuh"
#include "device/launch.cuh"
#include "device/reductions.cuh"
#include "device/shared_memory.cuh"
#include "device/tensor_core.cuh"
#include "device/tensor_map.cuh"
#include "device/vectors.cuh"
#include "ops/cuda/activation.cuh"
#include "ops/cuda/hidden_tap.cuh"
#include "ops/cuda/tile_formats.cuh"
#include "ops/cuda/tile_linear.h"

namespace bequest::cuda::tiles {

inline constexpr int kWarps = 8, kThreads = kWarps * kWarp;
inline constexpr int kLineBytes = 128;  // of a row, of a stage
inline constexpr int kLine = 64;        // of x
inline constexpr int kTile = 8;         // tokens
inline constexpr int kAccesses = 2;     // of a lane, to a row of a stage
inline constexpr int kMostStages = 16;
inline constexpr int kMostSplits = 8;
inline constexpr int kWordBytes = 16;  // of a row, of a stage: the words of four groups, two of them its own

// How the copy engine sees W, x and the words of groups.
struct Maps {
  CUtensorMap weight, rows, words;
};

template <class Format, int kTokenTiles, int kRowGroups>
struct Sizes {
  static constexpr int kTokens = kTokenTiles * kTile;
  // Of 16 rows of W, as registers allow; groups have sums of their own.
  static constexpr int kWarpTiles = kTokenTiles * (Format::kGrouped ? 2 : 1) <= 8 ? 4 : 2;
  static constexpr int kWarpRows = kWarpTiles * 16;
  static constexpr int kRows = kRowGroups * kWarpRows;
  static constexpr int kSlices = kWarps / kRowGroups;  // warps that take turns
  static constexpr int kWeightBytes = kRows * kLineBytes;
  static constexpr int kGroupBytes = Format::kGrouped ? kRows * kWordBytes : 0;
  static constexpr int kLines = Format::kUnit / kLine;
  static constexpr int kLineOfRows = kTokens * kLineBytes;  // bytes of x
  static constexpr int kStageBytes = kWeightBytes + kGroupBytes + kLines * kLineOfRows;
  static constexpr int kPitch = kRows + 4;  // floats of a token's sums: those stored at once are in other banks
  static constexpr int kPartBytes = kTokens * kPitch * 4;
  static constexpr int kSquareBytes = kSlices * kTokens * 4;
  static_assert(kStageBytes % 1024 == 0 && kRowGroups * kSlices == kWarps);
};

template <class Size>
__device__ __forceinline__ uint32_t gain_place(int stages) {
  const int ring = stages * Size::kStageBytes, parts = Size::kSlices * Size::kPartBytes;
  return static_cast<uint32_t>(((ring > parts ? ring : parts) + Size::kSquareBytes + 127) / 128 * 128);
}
template <class Size>
__device__ __forceinline__ uint32_t squares_place(int stages) {
  const int ring = stages * Size::kStageBytes, parts = Size::kSlices * Size::kPartBytes;
  return static_cast<uint32_t>(ring > parts ? ring : parts);
}

__device__ __forceinline__ float2 load_in_block(uint32_t address) {
  float2 v;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ float load_float_in_block(uint32_t address) {
  float v;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ uint32_t multiply_pair(uint32_t a, uint32_t b) {
  uint32_t c;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
__device__ __forceinline__ void add_squares(uint32_t pair, float& sum) {
  const float low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xffff0000u);
  sum += low * low;
  sum += high * high;
}

// The piece of k that a CTA has, in units.
struct Piece {
  int first, count;

  __device__ Piece(int units, int split, int splits) {
    first = split * units / splits;
    count = (split + 1) * units / splits - first;
  }
};

// A stage of the ring, and the parity of the phase that its barriers are in.
struct RingPlace {
  int stage;
  uint32_t parity;

  __device__ __forceinline__ void wrap(int stages) {
    while (stage >= stages) stage -= stages, parity ^= 1;
  }
};

// Fills the ring. By one thread.
template <class Format, class Size>
class Producer {
 public:
  __device__ Producer(const Maps& maps, uint32_t ring, PhaseBarrier* arrived, int halves, int tile, int block)
      : maps_(maps), ring_(ring), arrived_(arrived), tile_(tile * (Size::kRows / halves)),
        block_(block * Size::kTokens), policy_(read_once_policy()) {}

  __device__ __forceinline__ void load_weights(int unit, int stage) const {
    const uint32_t to = ring_ + stage * Size::kStageBytes;
    arrived_[stage].arrive_expecting(Size::kStageBytes);
    copy_box(maps_.weight, to, arrived_[stage], {unit * (kLineBytes / 2), tile_, 0, 0}, policy_);
    if constexpr (Format::kGrouped)
      copy_box(maps_.words, to + Size::kWeightBytes, arrived_[stage], {unit / 2 * 4, tile_, 0, 0}, policy_);
  }
  __device__ __forceinline__ void load_rows(int unit, int stage) const {
    const uint32_t to = ring_ + stage * Size::kStageBytes + Size::kWeightBytes + Size::kGroupBytes;
    copy_box(maps_.rows, to, arrived_[stage], 0, block_, unit * Size::kLines);
  }

 private:
  const Maps& maps_;
  const uint32_t ring_;
  PhaseBarrier* const arrived_;
  const int tile_, block_;
  const uint64_t policy_;
};

// A lane's places in a stage: in its first row of W, of x, of the words of groups, and in the norm's weight.
struct LanePlaces {
  uint32_t weights, rows, words, gain;
};

// What a warp has summed: its tiles of 16 rows of W by tokens.
template <class Format, int kTokenTiles, class Size, bool kNorm>
struct Sums {
  using Tiles = float[Size::kWarpTiles][kTokenTiles][4];
  Tiles of = {};
  float square[kTokenTiles] = {};

  // A stage. `mine`: of the `sharers` warps with the same rows of x, which of them this one squares
  __device__ __forceinline__ void add(const LanePlaces& at, int mine, int sharers) {
    if constexpr (Format::kGrouped) {
#pragma unroll 1
      for (int access = 0; access < kAccesses; ++access) add_group(access, at);
    } else {
#pragma unroll
      for (int access = 0; access < kAccesses; ++access) {
        uint4 codes[Size::kWarpTiles][2];
        load_codes(access, at, codes);
        multiply(access, at, codes, {}, of, mine, sharers);
      }
    }
  }

 private:
  using Words = uint32_t[Size::kWarpTiles][2];
  using Codes = uint4[Size::kWarpTiles][2];

  __device__ static __forceinline__ void load_codes(int access, const LanePlaces& at, Codes& codes) {
    const uint32_t from = at.weights ^ Format::piece_of(access) * 16;
#pragma unroll
    for (int m = 0; m < Size::kWarpTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) codes[m][half] = load_16(from + (m * 16 + half * 8) * kLineBytes);
  }

  // The sums of a group are scaled when they are done.
  __device__ __forceinline__ void add_group(int access, const LanePlaces& at) {
    Codes codes;
    load_codes(access, at, codes);
    Words words;
#pragma unroll
    for (int m = 0; m < Size::kWarpTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        words[m][half] = load_4(at.words + access * 4 + (m * 16 + half * 8) * kWordBytes);
    Tiles sums = {};
    multiply(access, at, codes, words, sums, 0, 1);
#pragma unroll
    for (int m = 0; m < Size::kWarpTiles; ++m)
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) of[m][t][i] += Format::scale(words[m][i / 2]) * sums[m][t][i];
  }

  // What an access holds of k.
  __device__ __forceinline__ void multiply(int access, const LanePlaces& at, const Codes& codes, const Words& words,
                                           Tiles& sums, int mine, int sharers) {
#pragma unroll
    for (int vector = 0; vector < Format::kVectors; ++vector) {
      const uint32_t flip = Format::x_piece_of(access, vector) * 16;
      const uint32_t rows = (at.rows ^ flip) + Format::rows_line(access) * Size::kLineOfRows;
      uint4 x[kTokenTiles];
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) x[t] = load_16(rows + t * (kTile * kLineBytes));
      if constexpr (kNorm) weigh(x, load_16(at.gain ^ flip), mine, sharers);
#pragma unroll
      for (int m = 0; m < Size::kWarpTiles; ++m) {
        uint32_t low[4], high[4];
        Format::widen(codes[m][0], vector, words[m][0], low);
        Format::widen(codes[m][1], vector, words[m][1], high);
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
          multiply_accumulate(sums[m][t], {low[0], high[0], low[1], high[1]}, x[t].x, x[t].y);
          multiply_accumulate(sums[m][t], {low[2], high[2], low[3], high[3]}, x[t].z, x[t].w);
        }
      }
    }
  }

  // Rows of x times the norm's weight, their squares added where they are this warp's to square.
  __device__ __forceinline__ void weigh(uint4 (&x)[kTokenTiles], const uint4& gain, int mine, int sharers) {
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
      if (t % sharers == mine) {
        add_squares(x[t].x, square[t]), add_squares(x[t].y, square[t]);
        add_squares(x[t].z, square[t]), add_squares(x[t].w, square[t]);
      }
      x[t] = {multiply_pair(x[t].x, gain.x), multiply_pair(x[t].y, gain.y), multiply_pair(x[t].z, gain.z),
              multiply_pair(x[t].w, gain.w)};
    }
  }
};

// The outputs of a CTA, two of a token to a thread at a time: [tokens, outputs of a tile / 2], dealt to the
// threads of the cluster.
template <class Format, class Size>
class Results {
 public:
  __device__ Results(const TileLinearParams& p, int tile, int block, uint32_t parts, uint32_t squares)
      : p_(p), parts_(parts), squares_(squares), gated_(p.result == SkinnyResult::kGate),
        pairs_(gated_ ? Size::kRows / 4 : Size::kRows / 2), first_token_(block * Size::kTokens),
        tokens_(min(p.num_tokens - first_token_, Size::kTokens)),
        stride_(static_cast<int>(gated_ ? p.out_features / 2 : p.out_features)), first_output_(tile * pairs_ * 2),
        begin_(static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x)) {}

  // What the thread's first results are added to: asked for early.
  __device__ __forceinline__ uint32_t first_addend() const {
    if (p_.result != SkinnyResult::kAdd || begin_ >= tokens_ * pairs_ || output(begin_) >= stride_) return 0;
    return __ldcg(place(begin_));
  }

  __device__ __forceinline__ void store(uint32_t first_before) const {
    const int step = static_cast<int>(gridDim.x) * kThreads;
#pragma unroll 1
    for (int i = begin_; i < tokens_ * pairs_; i += step) {
      const int token = i / pairs_, at = output(i);
      if (at >= stride_) continue;
      uint32_t before = first_before;
      if (p_.result == SkinnyResult::kAdd && i != begin_) before = __ldcg(place(i));
      const float norm = scale_of(token);
      float2 value = finished(token, i % pairs_ * 2, at, norm);
      if (gated_) {
        const float2 up = finished(token, Size::kRows / 2 + i % pairs_ * 2, stride_ + at, norm);
        value = {gate(p_.activation, value.x, up.x), gate(p_.activation, value.y, up.y)};
      }
      *place(i) = pack(value.x + __uint_as_float(before << 16), value.y + __uint_as_float(before & 0xffff0000u));
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
    float2 sum{};
#pragma unroll 1
    for (int split = 0; split < static_cast<int>(gridDim.x); ++split) {
      const float2 part = load_in_block(address_in_block(mine, split));
      sum.x += part.x, sum.y += part.y;
    }
    float2 scale{norm, norm};
    if (!Format::kGrouped && p_.scales != nullptr) {
      const float2 rows = __ldg(reinterpret_cast<const float2*>(static_cast<const float*>(p_.scales) + at));
      scale.x *= rows.x, scale.y *= rows.y;
    }
    sum.x *= scale.x, sum.y *= scale.y;
    if (p_.bias != nullptr) {
      const uint32_t bias = __ldg(reinterpret_cast<const uint32_t*>(static_cast<const BFloat16*>(p_.bias) + at));
      sum.x += __uint_as_float(bias << 16), sum.y += __uint_as_float(bias & 0xffff0000u);
    }
    return {rounded<BFloat16>(sum.x), rounded<BFloat16>(sum.y)};
  }

  // What the norm multiplies a token by.
  __device__ __forceinline__ float scale_of(int token) const {
    if (p_.norm_weight == nullptr) return 1;
    float square = 0;
#pragma unroll 1
    for (int split = 0; split < static_cast<int>(gridDim.x); ++split)
      square += load_float_in_block(address_in_block(squares_ + token * 4, split));
    return rsqrtf(square / static_cast<float>(p_.in_features) + p_.eps);
  }

  const TileLinearParams& p_;
  const uint32_t parts_, squares_;
  const bool gated_;
  const int pairs_, first_token_, tokens_, stride_, first_output_, begin_;
};

// Leaves what a warp has summed in its slice's part.
template <class Format, int kTokenTiles, class Size, bool kNorm>
__device__ __forceinline__ void leave(const Sums<Format, kTokenTiles, Size, kNorm>& sums, float* part,
                                      float* squares, int warp_row, int mine, int sharers) {
  const int lane = threadIdx.x % kWarp, group = Format::row(lane / 4), quad = lane % 4;
#pragma unroll
  for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
    for (int m = 0; m < Size::kWarpTiles; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        part[(t * kTile + quad * 2 + i % 2) * Size::kPitch + warp_row + m * 16 + i / 2 * 8 + group] =
            sums.of[m][t][i];
    if constexpr (kNorm) {
      const float all = quad_sum(sums.square[t]);
      if (t % sharers == mine && quad == 0) squares[t * kTile + lane / 4] = all;
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
      auto* at = reinterpret_cast<float4*>(parts + i / (Size::kRows / 4) * Size::kPitch + i % (Size::kRows / 4) * 4);
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

// Stores the rows that somebody wants to see as they are before the norm.
__device__ __forceinline__ void tap_rows(const TileLinearParams& p) {
  const int vectors = static_cast<int>(p.in_features) / 8;
  const int blocks = static_cast<int>(gridDim.x * gridDim.y);
#pragma unroll 1
  for (int row = static_cast<int>(blockIdx.y * gridDim.x + blockIdx.x); row < p.num_tokens; row += blocks) {
    auto* to = reinterpret_cast<uint4*>(tap_row<BFloat16>(p.tap, row, p.in_features));
    if (to == nullptr) continue;
    const uint4* from = static_cast<const uint4*>(p.x) + int64_t{row} * vectors;
#pragma unroll 1
    for (int i = threadIdx.x; i < vectors; i += kThreads) to[i] = from[i];
  }
}

// grid (splits, tiles of rows of W · blocks of tokens), clusters of all splits
template <class Format, int kTokenTiles, int kRowGroups, bool kNorm, int kBlocks>
__global__ __launch_bounds__(kThreads, kBlocks) void tile_linear_kernel(const __grid_constant__ Maps maps,
                                                                        const __grid_constant__ TileLinearParams p,
                                                                        const int stages) {
  using Size = Sizes<Format, kTokenTiles, kRowGroups>;
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ PhaseBarrier arrived[kMostStages], freed[kMostStages];
  let_next_start();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int blocks = static_cast<int>(ceil_div(p.num_tokens, Size::kTokens));
  const int tile = static_cast<int>(blockIdx.y) / blocks, block = static_cast<int>(blockIdx.y) % blocks;
  const Piece piece(static_cast<int>(ceil_div(p.in_features, Format::kUnit)), static_cast<int>(blockIdx.x),
                    static_cast<int>(gridDim.x));
  const uint32_t ring = shared_address(shared);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages; ++stage) {
      arrived[stage].init(1);
      freed[stage].init(kRowGroups);
    }
    publish_barriers();
  }
  auto* gain = reinterpret_cast<uint4*>(shared + gain_place<Size>(stages));
  if constexpr (kNorm) {
    const int vectors = static_cast<int>(p.in_features) / 8, first = piece.first * (Format::kUnit / 8);
    for (int i = threadIdx.x; i < piece.count * (Format::kUnit / 8); i += kThreads)
      gain[i] = first + i < vectors ? __ldg(static_cast<const uint4*>(p.norm_weight) + first + i)
                                    : make_uint4(0, 0, 0, 0);
  }
  __syncthreads();
  const Producer<Format, Size> producer(maps, ring, arrived, p.result == SkinnyResult::kGate ? 2 : 1, tile, block);
  if (warp == 0 && is_elected()) {
    const int ahead = min(stages, piece.count);
    for (int i = 0; i < ahead; ++i) producer.load_weights(piece.first + i, i);
    wait_for_previous();
    for (int i = 0; i < ahead; ++i) producer.load_rows(piece.first + i, i);
  }
  __syncwarp();
  wait_for_previous();
  auto* parts = reinterpret_cast<float*>(shared);
  auto* squares = reinterpret_cast<float*>(shared + squares_place<Size>(stages));
  const Results<Format, Size> results(p, tile, block, ring, shared_address(squares));
  const uint32_t before = results.first_addend();
  const int mine = warp % kRowGroups, slice = warp / kRowGroups;
  const int group = lane / 4, quad = lane % 4, row = Format::row(group);
  const uint32_t weights = ring + (mine * Size::kWarpRows + row) * kLineBytes + (Format::piece(quad) ^ row) * 16;
  const uint32_t words = ring + Size::kWeightBytes + (mine * Size::kWarpRows + row) * kWordBytes;
  const uint32_t rows = ring + Size::kWeightBytes + Size::kGroupBytes + Format::line(quad) * Size::kLineOfRows +
                        group * kLineBytes + (Format::x_piece(quad) ^ group) * 16;
  const uint32_t gains = shared_address(gain) + (Format::line(quad) * 8 + Format::x_piece(quad)) * 16;
  Sums<Format, kTokenTiles, Size, kNorm> sums;
  RingPlace now{slice, 0}, before_now{slice, 0};
#pragma unroll 1
  for (int i = slice; i < piece.count; i += Size::kSlices) {
    now.wrap(stages);
    arrived[now.stage].wait(now.parity);
    // The stage that the slice has read before is filled again: by now all of its warps are done with it.
    if (mine == 0 && i >= Size::kSlices) {
      const int next = i - Size::kSlices + stages;
      if (next < piece.count && is_elected()) {
        freed[before_now.stage].wait(before_now.parity);
        producer.load_weights(piece.first + next, before_now.stage);
        producer.load_rows(piece.first + next, before_now.stage);
      }
      __syncwarp();
    }
    const int at = now.stage * Size::kStageBytes;
    sums.add({weights + at, rows + at, words + at + (piece.first + i) % 2 * 8, gains + i * (Format::kUnit * 2)}, mine,
             kRowGroups);
    __syncwarp();
    if (lane == 0) freed[now.stage].arrive();
    before_now = now;
    now.stage += Size::kSlices;
  }
  __syncthreads();  // all of the ring has been read
  leave<Format, kTokenTiles, Size, kNorm>(sums, parts + slice * (Size::kPartBytes / 4),
                                          squares + slice * Size::kTokens, mine * Size::kWarpRows, mine,
                                          kRowGroups);
  __syncthreads();
  add_slices<Size>(parts, squares, min(p.num_tokens - block * Size::kTokens, Size::kTokens), kNorm);
  if (gridDim.x > 1)
    sync_cluster();
  else
    __syncthreads();
  results.store(before);
  if (kNorm && p.tap.ring_rows != nullptr) tap_rows(p);
  if (gridDim.x > 1) sync_cluster();  // nobody leaves whose memory is still read
}

// --- on the host ----------------------------------------------------------------------------------------

inline CUtensorMap encode(const void* data, CUtensorMapDataType type, CUtensorMapSwizzle swizzle, cuuint32_t rank,
                          const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box) {
  const cuuint32_t steps[] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = tensor_map_encoder()(
      &map, type, rank, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS, "the driver refused the tensor map of a product");
  return map;
}

// Rows of W, of a gated product half of the gate and half of up. What lies beyond an end arrives as zeros.
inline CUtensorMap weight_map(const void* weight, int64_t out_features, int64_t row_bytes, int tile_rows,
                              bool gated) {
  const cuuint64_t halves = gated ? 2 : 1, rows = static_cast<cuuint64_t>(out_features) / halves;
  const auto bytes = static_cast<cuuint64_t>(row_bytes);
  const cuuint64_t sizes[] = {bytes / 2, rows, halves, 1}, strides[] = {bytes, rows * bytes, halves * rows * bytes};
  const cuuint32_t box[] = {kLineBytes / 2, static_cast<cuuint32_t>(tile_rows) / static_cast<cuuint32_t>(halves),
                            static_cast<cuuint32_t>(halves), 1};
  return encode(weight, CU_TENSOR_MAP_DATA_TYPE_UINT16, CU_TENSOR_MAP_SWIZZLE_128B, 4, sizes, strides, box);
}

inline CUtensorMap words_map(const void* words, int64_t out_features, int64_t pitch, int tile_rows, bool gated) {
  const cuuint64_t halves = gated ? 2 : 1, rows = static_cast<cuuint64_t>(out_features) / halves;
  const auto bytes = static_cast<cuuint64_t>(pitch) * 4;
  const cuuint64_t sizes[] = {bytes / 4, rows, halves, 1}, strides[] = {bytes, rows * bytes, halves * rows * bytes};
  const cuuint32_t box[] = {kWordBytes / 4, static_cast<cuuint32_t>(tile_rows) / static_cast<cuuint32_t>(halves),
                            static_cast<cuuint32_t>(halves), 1};
  return encode(words, CU_TENSOR_MAP_DATA_TYPE_UINT32, CU_TENSOR_MAP_SWIZZLE_NONE, 4, sizes, strides, box);
}

// Rows of x in lines of 64.
inline CUtensorMap rows_map(const void* x, int num_tokens, int64_t in_features, int tokens, int lines) {
  const auto k = static_cast<cuuint64_t>(in_features);
  const cuuint64_t sizes[] = {kLine, static_cast<cuuint64_t>(num_tokens), k / kLine}, strides[] = {k * 2, kLineBytes};
  const cuuint32_t box[] = {kLine, static_cast<cuuint32_t>(tokens), static_cast<cuuint32_t>(lines)};
  return encode(x, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_SWIZZLE_128B, 3, sizes, strides, box);
}

template <class Format, int kTokenTiles, int kRowGroups, bool kNorm, int kBlocks>
void launch_kernel(const TileLinearParams& p, const TilePlan& plan, Stream stream) {
  using Size = Sizes<Format, kTokenTiles, kRowGroups>;
  const bool gated = p.result == SkinnyResult::kGate;
  const int64_t row_bytes = p.in_features * kLineBytes / Format::kUnit;
  Maps maps{weight_map(p.weight, p.out_features, row_bytes, Size::kRows, gated),
            rows_map(p.x, p.num_tokens, p.in_features, Size::kTokens, Size::kLines),
            {}};
  if constexpr (Format::kGrouped) maps.words = words_map(p.scales, p.out_features, p.pitch, Size::kRows, gated);
  const int64_t units = ceil_div(p.in_features, Format::kUnit), tiles = ceil_div(p.out_features, Size::kRows);
  const int64_t blocks = ceil_div(p.num_tokens, Size::kTokens);
  const int64_t ring = int64_t{plan.stages} * Size::kStageBytes, parts = int64_t{Size::kSlices} * Size::kPartBytes;
  const int64_t gain = kNorm ? ceil_div(units, plan.splits) * Format::kUnit * 2 : 0;
  const int64_t bytes = round_up(std::max(ring, parts) + Size::kSquareBytes, 128) + gain;
  launch(tile_linear_kernel<Format, kTokenTiles, kRowGroups, kNorm, kBlocks>,
         {.grid = {static_cast<unsigned>(plan.splits), static_cast<unsigned>(tiles * blocks)},
          .block = kThreads,
          .shared_bytes = static_cast<size_t>(bytes),
          .cluster = static_cast<unsigned>(plan.splits),
          .overlaps_previous = true},
         stream, maps, p, plan.stages);
}

}  // namespace bequest::cuda::tiles
