// A CTA has 256 rows of W, 32 to a warp, and a piece of k. Stages of 128 bytes of each row, and of x, come
// into a ring in shared memory. Tensor cores take 16 rows of W against 8 tokens; codes become bfloat16 in
// registers, which is exact, and the sums of a group of 128 are scaled when they are done.
//
// The order of k is free as long as both sides have the same. A lane reads 16 bytes of a row of W at once,
// and calls each eight codes two steps of its own four places. x lies so that the lanes of a quad read
// neighbours.
#include <algorithm>

#include "core/dtype.h"
#include "device/copies.cuh"
#include "device/current_device.cuh"
#include "device/launch.cuh"
#include "device/pairs.cuh"
#include "device/reductions.cuh"
#include "device/shared_memory.cuh"
#include "device/tensor_core.cuh"
#include "device/vectors.cuh"
#include "ops/cuda/coded_linear.h"
#include "ops/cuda/summed_parts.h"
#include "ops/cuda/unit_walk.cuh"

namespace bequest::cuda {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kRows = 256;     // of W
constexpr int kWarpRows = 32;  // two tiles of 16
constexpr int kGroup = 128;    // of k
constexpr int kStages = 3;
constexpr int kRowBytes = 128;  // of a stage
constexpr int kCodeBytes = kRows * kRowBytes;
constexpr int kTile = 8;     // tokens
constexpr int kVectors = 4;  // of 8 values of x that a lane has of a group
static_assert(kRows == kThreads && kRows == kWarps * kWarpRows);

// Two groups are 128 bytes of a row. A lane has 32 neighbours of each.
struct Int4 {
  static constexpr int kGroups = 2, kReads = 1;  // of a stage; of 16 bytes for a group
  // Where vector `i` of a group is read: by lane i / 4 of a quad, as its vector i % 4.
  __device__ static int place(int i) { return i % 4 * 4 + i / 4; }
  __device__ static float scale(uint32_t word) { return __uint_as_float(word & 0xffffff00u); }
  __device__ static uint32_t offset(uint32_t word) { return (0x4300u + (word & 0xff)) * 0x10001u; }

  // Eight codes as four pairs of bfloat16: as the last bits of 128 they are one at once. offset: a pair of
  // 128 + zero
  __device__ static __forceinline__ void widen(const uint4 (&codes)[kReads], int vector, uint32_t offset,
                                               uint32_t (&pairs)[4]) {
    const uint32_t words[4] = {codes[0].x, codes[0].y, codes[0].z, codes[0].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t pair;
      asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(pair) : "r"(words[vector] >> (4 * i)));
      asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(pairs[i]) : "r"(pair), "r"(offset));
    }
  }
};

// Of k, of a stage.
template <class Codec>
constexpr int kUnit = Codec::kGroups * kGroup;
template <class Codec>
constexpr int kWordBytes = kRows * Codec::kGroups * 4;
// Of x: two tokens that are read at once lie in different banks.
template <class Codec>
constexpr int kTokenPitch = kUnit<Codec> * 2 + 64;
template <class Codec, int kTokenTiles>
constexpr int kStageBytes = kCodeBytes + kWordBytes<Codec> + kTokenTiles * kTile * kTokenPitch<Codec>;

// Asks for a unit of k of all rows of the CTA, and of x. By the whole block.
template <class Codec, int kTokenTiles>
class Loader {
 public:
  __device__ Loader(const CodedLinearParams& p, uint32_t ring)
      : p_(p), ring_(ring), policy_(read_once_policy()) {}

  __device__ __forceinline__ void load_weights(int unit, int stage) const {
    constexpr int kPieces = kRowBytes / 16;  // of a row
    const uint32_t to = ring_ + stage * kStageBytes<Codec, kTokenTiles>;
    const auto* codes = static_cast<const uint8_t*>(p_.codes) + int64_t{unit} * kRowBytes;
    const int64_t row_bytes = p_.in_features / kUnit<Codec> * kRowBytes;
#pragma unroll
    for (int i = threadIdx.x; i < kRows * kPieces; i += kThreads) {
      const int row = i / kPieces, piece = i % kPieces;
      copy_16_once_async(to + row * kRowBytes + (piece ^ row % 2 * 4) * 16,
                         codes + row_of(row) * row_bytes + piece * 16, true, policy_);
    }
    const uint32_t* words = p_.scales + row_of(threadIdx.x) * p_.pitch;
#pragma unroll
    for (int g = 0; g < Codec::kGroups; ++g)
      copy_4_async(to + kCodeBytes + (threadIdx.x * Codec::kGroups + g) * 4,
                   words + unit * Codec::kGroups + g);
  }

  __device__ __forceinline__ void load_rows(int unit, int stage) const {
    constexpr int kPieces = kUnit<Codec> / 8, kOfGroup = kGroup / 8;  // of a token, of a group
    const uint32_t to = ring_ + stage * kStageBytes<Codec, kTokenTiles> + kCodeBytes + kWordBytes<Codec>;
    const auto* x = static_cast<const BFloat16*>(p_.x) + int64_t{unit} * kUnit<Codec>;
#pragma unroll
    for (int i = threadIdx.x; i < kTokenTiles * kTile * kPieces; i += kThreads) {
      const int token = i / kPieces, piece = i % kPieces;
      const int place = piece / kOfGroup * kOfGroup + Codec::place(piece % kOfGroup);
      copy_16_async(to + token * kTokenPitch<Codec> + place * 16,
                    x + min(token, p_.num_tokens - 1) * p_.in_features + piece * 8, true);
    }
  }

 private:
  // Rows beyond the last are the last; nobody stores what becomes of them.
  __device__ __forceinline__ int64_t row_of(int row) const {
    return min(int64_t{blockIdx.x} * kRows + row, p_.out_features - 1);
  }

  const CodedLinearParams& p_;
  const uint32_t ring_;
  const uint64_t policy_;
};

// The sums of a warp: two tiles of 16 rows of W by tokens.
template <class Codec, int kTokenTiles>
struct Sums {
  float of[2][kTokenTiles][4] = {};

  // A group of k. codes: of the lane's rows, 8 apart; x: the lane's place in its token of the first tile
  __device__ __forceinline__ void add(const uint4 (&codes)[4][Codec::kReads], const uint32_t (&words)[4],
                                      uint32_t x) {
    float sums[2][kTokenTiles][4] = {};
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      uint32_t pairs[4][4];
#pragma unroll
      for (int r = 0; r < 4; ++r) Codec::widen(codes[r], vector, Codec::offset(words[r]), pairs[r]);
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        const uint4 right = load_16(x + t * (kTile * kTokenPitch<Codec>)+vector * 64);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const auto& low = pairs[2 * m];
          const auto& high = pairs[2 * m + 1];
          multiply_accumulate(sums[m][t], {low[0], high[0], low[1], high[1]}, right.x, right.y);
          multiply_accumulate(sums[m][t], {low[2], high[2], low[3], high[3]}, right.z, right.w);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) of[m][t][i] += Codec::scale(words[2 * m + i / 2]) * sums[m][t][i];
  }
};

// What a lane has summed: as numbers where it is all, and to its piece's part of the scratch where not.
template <class Codec, int kTokenTiles>
__device__ __forceinline__ void store(const CodedLinearParams& p, const Sums<Codec, kTokenTiles>& sums,
                                      int warp, int lane) {
  const auto* bias = static_cast<const BFloat16*>(p.bias);
  const int64_t rows = p.out_features;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t row = int64_t{blockIdx.x} * kRows + warp * kWarpRows + m * 16 + i / 2 * 8 + lane / 4;
      if (row >= rows) continue;
      const float added = bias != nullptr && gridDim.y == 1 ? widen(bias[row]) : 0.0f;
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        const int token = t * kTile + lane % 4 * 2 + i % 2;
        if (token >= p.num_tokens) continue;
        const int64_t at = token * rows + row;
        if (gridDim.y == 1)
          static_cast<BFloat16*>(p.out)[at] = narrow<BFloat16>(sums.of[m][t][i] + added);
        else
          p.parts[blockIdx.y * (p.num_tokens * rows) + at] = sums.of[m][t][i];
      }
    }
}

// grid (N / 256, pieces)
template <class Codec, int kTokenTiles>
__global__ __launch_bounds__(kThreads, 1) void coded_linear_kernel(const CodedLinearParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  let_next_start();
  const uint32_t ring = shared_address(shared);
  const Loader<Codec, kTokenTiles> loader(p, ring);
  const UnitWalk<kStages, Loader<Codec, kTokenTiles>> walk(
      loader, static_cast<int>(p.in_features / kUnit<Codec>), static_cast<int>(blockIdx.y),
      static_cast<int>(gridDim.y));
  walk.begin_weights();
  wait_for_previous();
  walk.begin_rows();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int row = warp * kWarpRows + lane / 4;  // the lane's first; others are 8 apart
  Sums<Codec, kTokenTiles> sums;
  walk.each([&](int stage) {
    const uint32_t at = ring + stage * kStageBytes<Codec, kTokenTiles>, words_at = at + kCodeBytes;
    const uint32_t x = words_at + kWordBytes<Codec> + lane / 4 * kTokenPitch<Codec> + lane % 4 * 16;
#pragma unroll
    for (int g = 0; g < Codec::kGroups; ++g) {
      uint4 codes[4][Codec::kReads];
      uint32_t words[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        // Lanes are served eight at a time: two rows, which lie in different banks.
#pragma unroll
        for (int i = 0; i < Codec::kReads; ++i)
          codes[r][i] =
              load_16(at + (row + r * 8) * kRowBytes + (((g + i) * 4 + lane % 4) ^ row % 2 * 4) * 16);
        words[r] = load_4(words_at + ((row + r * 8) * Codec::kGroups + g) * 4);
      }
      sums.add(codes, words, x + g * (kGroup * 2));
    }
  });
  store(p, sums, warp, lane);
}

template <class Codec, int kTokenTiles>
void launch_tiles(const CodedLinearParams& p, unsigned pieces, Stream stream) {
  launch(coded_linear_kernel<Codec, kTokenTiles>,
         {.grid = {static_cast<unsigned>(ceil_div(p.out_features, kRows)), pieces},
          .block = kThreads,
          .shared_bytes = size_t{kStages} * kStageBytes<Codec, kTokenTiles>,
          .overlaps_previous = true},
         stream, p);
}

template <class Codec>
void launch_of(const CodedLinearParams& p, unsigned pieces, Stream stream) {
  if (p.num_tokens <= 8) return launch_tiles<Codec, 1>(p, pieces, stream);
  if (p.num_tokens <= 16) return launch_tiles<Codec, 2>(p, pieces, stream);
  if (p.num_tokens <= 32) return launch_tiles<Codec, 4>(p, pieces, stream);
  launch_tiles<Codec, 8>(p, pieces, stream);
}

}  // namespace

bool can_multiply_codes(int64_t out_features, int64_t in_features) {
  return out_features % 2 == 0 && in_features >= kUnit<Int4> && in_features % kUnit<Int4> == 0;
}

int64_t coded_splits(int64_t out_features, int64_t in_features) {
  const int64_t blocks = ceil_div(out_features, kRows), most = in_features / (4 * kGroup);
  return std::clamp<int64_t>(multiprocessors() / blocks, 1, std::max<int64_t>(most, 1));
}

void coded_linear(const CodedLinearParams& p, Stream stream) {
  check(p.num_tokens >= 1 && p.num_tokens <= kMostCodedRows, "coded_linear: 1 to 64 rows");
  check(can_multiply_codes(p.out_features, p.in_features), "coded_linear: sizes");
  check(is_aligned(p.x, 16) && is_aligned(p.codes, 16) && is_aligned(p.out, 4),
        "coded_linear: rows must be aligned");
  const auto pieces = static_cast<unsigned>(coded_splits(p.out_features, p.in_features));
  launch_of<Int4>(p, pieces, stream);
  if (pieces > 1)
    sum_parts({.parts = p.parts,
               .pieces = pieces,
               .bias = p.bias,
               .out = p.out,
               .num_rows = p.num_tokens,
               .outputs = p.out_features},
              stream);
}

}  // namespace bequest::cuda
