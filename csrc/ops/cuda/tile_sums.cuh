// What a warpgroup of tile_linear.cuh multiplies and sums, and the sizes of it all.
#pragma once

#include "device/barriers.cuh"
#include "device/reductions.cuh"
#include "device/shared_memory.cuh"
#include "device/warpgroup.cuh"
#include "ops/cuda/tile_formats.cuh"

namespace bequest::cuda::tiles {

inline constexpr int kWarpgroup = 4 * kWarp, kWarpgroups = 2, kThreads = kWarpgroups * kWarpgroup;
inline constexpr int kGroupRows = 64;   // of W, of one product of a warpgroup
inline constexpr int kLineBytes = 128;  // of a row, of a stage
inline constexpr int kTile = 8;         // tokens
inline constexpr int kMostStages = 16;
inline constexpr int kMostSplits = 8;  // CTAs of a cluster
inline constexpr int kWordBytes = 16;  // of a row, of a stage: the words of four groups, two of them its own

// The units of k that a CTA has.
struct Piece {
  int first, count;

  __device__ Piece(int units, int split, int splits) {
    first = split * units / splits;
    count = (split + 1) * units / splits - first;
  }
};

// kRowGroups times 64 rows of W against kTokenTiles times 8 tokens.
template <class FormatType, int kTokenTiles, int kRowGroups>
struct Sizes {
  using Format = FormatType;
  static constexpr int kTokens = kTokenTiles * kTile;
  static constexpr int kRows = kRowGroups * kGroupRows;
  static constexpr int kReaders = kRowGroups == 1 ? 1 : 2;  // warpgroups that read a stage
  static constexpr int kHeight = kRowGroups / kReaders;     // products of 64 rows, of each
  static constexpr int kSlices = kWarpgroups / kReaders;    // that take turns with the stages
  static constexpr int kSums = kTokenTiles * 4;             // of a lane, of a product
  static constexpr int kBatches = Format::kUnit / Format::kLine;
  static constexpr int kWeightBytes = kRows * kLineBytes;
  static constexpr int kGroupBytes = Format::kGrouped ? kRows * kWordBytes : 0;
  static constexpr int kLineOfRows = kTokens * kLineBytes;  // bytes of x
  static constexpr int kStageBytes = kWeightBytes + kGroupBytes + kBatches * kLineOfRows;
  // On a multiprocessor, as registers allow.
  static constexpr int kBlocks = (kHeight + (Format::kGrouped ? 1 : 0)) * kSums <= 64 ? 2 : 1;
  // Whether registers are left for what is known before the products.
  static constexpr bool kHasRoom = !Format::kGrouped && kHeight * kSums <= 32;
  static_assert(kStageBytes % 1024 == 0 && kReaders * kHeight == kRowGroups);
};

// Where a stage lies. words: of the unit's two groups, of the first row
struct StagePlaces {
  uint32_t weights, rows, words;
};

// What a warpgroup has summed.
template <class Size>
class Sums {
 public:
  using Format = typename Size::Format;
  static_assert(!Format::kIsOperand || Size::kBatches == 1);

  float of[Size::kHeight][Size::kSums] = {};

  // Whether the products of a stage are done when `add` returns; else those of the stage before it are.
  static constexpr bool kIsDone = !Format::kIsOperand;

  // reader: which of a stage's warpgroups this is
  __device__ explicit Sums(int reader)
      : reader_(reader),
        rows_(reader * Size::kHeight * kGroupRows + static_cast<int>(threadIdx.x) / kWarp % 4 * 16),
        weights_(rows_ * kLineBytes + Format::lane_place()) {
    asm volatile("" : "+r"(weights_));  // else each stage works it out anew
  }

  // The products of a stage.
  __device__ __forceinline__ void add(const StagePlaces& at) {
    if constexpr (Format::kGrouped)
      add_groups(at);
    else if constexpr (Format::kIsOperand)
      add_operands(at);
    else
      add_converted(at);
  }

  // Of two slices: adds a half of what the other has summed, that of the warps' rows from slice · 8 on, as
  // the first half of its own. mine, other: stages of which only W is overwritten, and that no slice but
  // their own has read last. By the block.
  static constexpr int kExchangeBytes = Size::kSums / 2 * kWarpgroup * 4;
  __device__ __forceinline__ void add_other_slice(int slice, uint32_t mine, uint32_t other) {
    static_assert(Size::kSlices == 2 && Size::kHeight == 1);
    constexpr int kPieces = Size::kSums / 4, kPieceBytes = kWarp * 8;  // two values of each lane
    constexpr int kWarpBytes = Size::kWeightBytes / 4;                 // of W: the warp's own rows
    float (&sums)[Size::kSums] = of[0];
    uint32_t place = threadIdx.x % kWarp * 8;
    // What other warps have read of the stage they may still be reading.
    if constexpr (kPieces * kPieceBytes <= kWarpBytes) {
      place += threadIdx.x / kWarp % 4 * kWarpBytes;
    } else {
      static_assert(kExchangeBytes <= Size::kStageBytes);
      place += threadIdx.x / kWarp % 4 * (kPieces * kPieceBytes);
      sync_warpgroup(1 + slice);
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const float2 low{sums[i * 4], sums[i * 4 + 1]}, high{sums[i * 4 + 2], sums[i * 4 + 3]};
      const float2 given = slice == 0 ? high : low, kept = slice == 0 ? low : high;
      store_8(mine + place + i * kPieceBytes, given);
      sums[i * 4] = kept.x, sums[i * 4 + 1] = kept.y;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint2 added = load_8(other + place + i * kPieceBytes);
      sums[i * 4] += __uint_as_float(added.x), sums[i * 4 + 1] += __uint_as_float(added.y);
    }
  }

  // All that was read of shared memory for the sums has arrived.
  __device__ __forceinline__ void settle() {
#pragma unroll
    for (auto& sums : of) pin(sums);
  }

  __device__ __forceinline__ void finish() {
#pragma unroll
    for (auto& sums : of) wait_products<0>(sums);
  }

 private:
  // Of x: `rows` is where the stage's lie.
  __device__ static __forceinline__ uint64_t line_of(uint32_t rows, int batch) {
    return operand(rows + batch * Size::kLineOfRows, kSwizzleBytes);
  }

  // W where it is.
  __device__ __forceinline__ void add_operands(const StagePlaces& at) {
    begin_products();
    const uint64_t b = line_of(at.rows, 0);
#pragma unroll
    for (int height = 0; height < Size::kHeight; ++height) {
      const uint64_t a =
          operand(at.weights + (reader_ * Size::kHeight + height) * (kGroupRows * kLineBytes), kSwizzleBytes);
#pragma unroll
      for (int step = 0; step < kBatchSteps; ++step)
        Format::multiply_operands(of[height], advance(a, step * 32), advance(b, step * 32));
    }
    commit_products();
    wait_operands<1>();
  }

  // W through registers: the next batch is made while the tensor cores have one. More than two batches at
  // once find no registers, and the compiler would wait for each product.
  __device__ __forceinline__ void add_converted(const StagePlaces& at) {
    constexpr int kCount = Size::kBatches * Size::kHeight;
    TileOperands a[kCount > 1 ? 2 : 1];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int batch = i / Size::kHeight, height = i % Size::kHeight;
      if (i >= 2) {
        wait_operands<1>();
        hold(a[i % 2]);
      }
      Format::load(at.weights + weights_ + height * (kGroupRows * kLineBytes), batch, {}, a[i % 2]);
      multiply_batch(of[height], a[i % 2], line_of(at.rows, batch), true);
    }
    wait_operands<0>();
#pragma unroll
    for (const TileOperands& operands : a) hold(operands);
  }

  // The sums of a group are scaled when they are done.
  __device__ __forceinline__ void add_groups(const StagePlaces& at) {
#pragma unroll
    for (int group = 0; group < 2; ++group)
#pragma unroll
      for (int height = 0; height < Size::kHeight; ++height) {
        const uint32_t row = rows_ + height * kGroupRows + threadIdx.x / 4 % 8;
        const uint32_t words = at.words + row * kWordBytes + group * 4;
        const uint32_t low = load_4(words), high = load_4(words + 8 * kWordBytes);
        const uint32_t offsets[2] = {Format::offset(low), Format::offset(high)};
        float sums[Size::kSums];
        TileOperands a[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int batch = group * 2 + half;
          Format::load(at.weights + weights_ + height * (kGroupRows * kLineBytes), batch, offsets, a[half]);
          multiply_batch(sums, a[half], line_of(at.rows, batch), half > 0);
        }
        wait_products<0>(sums);
        hold(a[0]), hold(a[1]);
#pragma unroll
        for (int i = 0; i < Size::kSums; ++i)
          of[height][i] += Format::scale(i / 2 % 2 == 0 ? low : high) * sums[i];
      }
  }

  __device__ static __forceinline__ void multiply_batch(float (&sums)[Size::kSums], const TileOperands& a,
                                                        uint64_t x, bool accumulate) {
    begin_products();
#pragma unroll
    for (int step = 0; step < kBatchSteps; ++step)
      multiply_rows(sums, a[step], advance(x, step * 32), accumulate || step > 0);
    commit_products();
  }

  // Products read registers while they run: these must stay what they are until here.
  __device__ static __forceinline__ void hold(const TileOperands& a) {
#pragma unroll
    for (const auto& step : a)
#pragma unroll
      for (uint32_t pair : step) asm volatile("" ::"r"(pair) : "memory");
  }

  const int reader_, rows_;  // rows_: the warp's first
  uint32_t weights_;         // where the lane reads in a stage
};

}  // namespace bequest::cuda::tiles
