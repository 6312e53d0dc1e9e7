// The kernel of tile_linear.h for up to 128 rows of x in e4m3.
//
// All CTAs run at once, one on a multiprocessor, and have the same work: a tile has as many rows of W as that
// takes, and where these are few, k is divided among the CTAs of a cluster. Tokens are the rows of the tensor
// cores' products, so a tile may have any number of rows of W in steps of 16. Up to 64 tokens are both
// warpgroups', which have half of the rows of W each; of more each has 64. Rows beyond the last token are
// whatever lies there, and nobody stores them. The ring has all of the multiprocessor's memory: with half of
// it too few bytes are on their way. A warp of its own asks for stages: the others are short of instructions.
#pragma once

#include <algorithm>

#include "device/copies.cuh"
#include "device/launch.cuh"
#include "ops/cuda/tile_linear.h"
#include "ops/cuda/tile_maps.cuh"
#include "ops/cuda/tile_wave_results.cuh"

namespace bequest::cuda::tiles {

struct WaveMaps {
  CUtensorMap weight, rows;
};

struct WaveBarriers {
  PhaseBarrier arrived[kMostStages], read[kMostStages];

  // By one thread.
  __device__ __forceinline__ void init(int stages) {
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      arrived[stage].init(1);
      read[stage].init(4 * kWarpgroups);
    }
    publish_barriers();
  }
};

// Stages of x, and W behind it, on their way to shared memory. Each call by one thread.
template <class Size>
class WaveRing {
 public:
  // line_bytes: of all tokens
  __device__ WaveRing(const WaveMaps& maps, uint32_t address, WaveBarriers& barriers, const WaveTile& tile,
                      int line_bytes)
      : maps_(maps),
        barriers_(barriers),
        tile_(tile),
        address_(address),
        line_bytes_(line_bytes),
        stage_bytes_(Size::kLines * (Size::kWeightBytes + line_bytes)) {}

  // Where line `line` of a stage lies.
  __device__ __forceinline__ uint32_t rows(int stage, int line) const {
    return address_ + stage * stage_bytes_ + line * line_bytes_;
  }
  __device__ __forceinline__ uint32_t weights(int stage, int line) const {
    return rows(stage, Size::kLines) + line * Size::kWeightBytes;
  }

  __device__ __forceinline__ void load_weights(int unit, int stage) const {
    const PhaseBarrier& arrived = barriers_.arrived[stage];
    barriers_.arrived[stage].arrive_expecting(stage_bytes_);
#pragma unroll
    for (int line = 0; line < Size::kLines; ++line) {
      const int column = (unit * Size::kLines + line) * (kLineBytes / 2), row = tile_.index * Size::kRows;
      const int4 at = tile_.gated ? make_int4(column, 0, 0, row / 4) : make_int4(column, row, 0, 0);
      copy_box(maps_.weight, weights(stage, line), arrived, at, read_once_policy());
    }
  }
  __device__ __forceinline__ void load_rows(int unit, int stage) const {
    copy_box(maps_.rows, rows(stage, 0), barriers_.arrived[stage], 0, 0, unit * Size::kLines);
  }

  // All but the first stages, which are on their way.
  __device__ __forceinline__ void go_on(const Piece& piece, int stages) const {
    RingCursor at;
#pragma unroll 1
    for (int i = stages; i < piece.count; ++i, at.advance(stages)) {
      barriers_.read[at.index].wait(at.parity);
      load_weights(piece.first + i, at.index);
      load_rows(piece.first + i, at.index);
    }
  }

 private:
  const WaveMaps& maps_;
  WaveBarriers& barriers_;
  const WaveTile& tile_;
  const uint32_t address_;
  const int line_bytes_, stage_bytes_;
};

// By a warpgroup.
template <class Size>
__device__ __forceinline__ void multiply_piece(float (&sums)[Size::kSums], const WaveRing<Size>& ring,
                                               WaveBarriers& barriers, int count, int stages) {
  const uint32_t my_rows = Size::first_token() * kLineBytes, my_weights = Size::first_row() * kLineBytes;
  RingCursor now;
  int last = 0;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    barriers.arrived[now.index].wait(now.parity);
    begin_products();
#pragma unroll
    for (int line = 0; line < Size::kLines; ++line) {
      const uint64_t x = operand(ring.rows(now.index, line) + my_rows, kSwizzleBytes);
      const uint64_t w = operand(ring.weights(now.index, line) + my_weights, kSwizzleBytes);
#pragma unroll
      for (int step = 0; step < kBatchSteps; ++step)
        multiply<F8Operands>(sums, advance(x, step * 32), advance(w, step * 32), true);
    }
    commit_products();
    wait_operands<1>();
    __syncwarp();
    if (i > 0 && threadIdx.x % kWarp == 0) barriers.read[last].arrive();
    last = now.index;
    now.advance(stages);
  }
}

// Of the threads that multiply.
template <class Size>
__device__ __forceinline__ void multiply_tile(const SkinnyLinearParams& p, const WaveTile& tile,
                                              const WaveRing<Size>& ring, WaveBarriers& barriers,
                                              WaveFactors<Size>& factors, int stages, uint8_t* shared) {
  factors.load_tokens(p);
  const WaveResults<Size> results(p, factors, tile);
  typename WaveResults<Size>::Residual before;
  if (tile.splits > 1) results.load_residual(0, before);
  float sums[Size::kSums] = {};
  multiply_piece(sums, ring, barriers, tile.piece.count, stages);
  let_next_start();
  wait_products<0>(sums);
  sync_threads<1, kThreads>();  // all of the ring has been read, and factors are there
  if (tile.splits == 1) return results.store(sums);
  leave<Size>(sums, reinterpret_cast<float*>(shared));
  publish_in_cluster();
  await_published();
  results.store_parts(shared_address(shared), before);
  await_published();  // nobody leaves whose memory is still read
}

// Stages of W that are asked for before the predecessor has ended: where the ring goes round, two thirds of
// it. More make the predecessor, which is small, wait for its rows.
__device__ __forceinline__ int early_stages(int stages, int count) {
  return count <= stages ? count : (2 * stages + 2) / 3;
}

// grid (splits, tiles), clusters of all splits. line_bytes: of all tokens
template <class Size>
__device__ __forceinline__ void multiply_wave(const WaveMaps& maps, const SkinnyLinearParams& p, int stages,
                                              int line_bytes) {
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ WaveBarriers barriers;
  __shared__ WaveFactors<Size> factors;
  const WaveTile tile(p, Size::kLines);
  const WaveRing<Size> ring(maps, shared_address(shared), barriers, tile, line_bytes);
  const int ahead = min(stages, tile.piece.count), early = early_stages(stages, tile.piece.count);
  const bool asks = threadIdx.x >= kThreads && is_elected();
  if (asks) {
    barriers.init(stages);
#pragma unroll 1
    for (int i = 0; i < early; ++i) ring.load_weights(tile.piece.first + i, i);
    prefetch_map(maps.rows);
  }
  __syncwarp();
  factors.load_rows(p, tile);
  __syncthreads();
  wait_for_previous();
  if (threadIdx.x < kThreads) return multiply_tile<Size>(p, tile, ring, barriers, factors, stages, shared);
  if (asks) {
#pragma unroll 1
    for (int i = 0; i < ahead; ++i) {
      if (i >= early) ring.load_weights(tile.piece.first + i, i);
      ring.load_rows(tile.piece.first + i, i);
    }
    ring.go_on(tile.piece, stages);
  }
  __syncwarp();
  if (tile.splits == 1) return;
  for (int barrier = 0; barrier < 2; ++barrier) {
    publish_in_cluster();
    await_published();
  }
}

template <class Size>
__global__ __launch_bounds__(kWaveThreads,
                             1) void tile_wave_kernel(const __grid_constant__ WaveMaps maps,
                                                      const __grid_constant__ SkinnyLinearParams p,
                                                      const int stages, const int line_bytes) {
  if constexpr (kIsHopper) multiply_wave<Size>(maps, p, stages, line_bytes);
}

// --- on the host ----------------------------------------------------------------------------------------

// Rows of W. Of a gated product two rows of the gate and the same two of up take turns: neighbouring lanes
// have them.
inline CUtensorMap wave_weight_map(const SkinnyLinearParams& p, int tile_rows) {
  if (p.result != SkinnyResult::kGate)
    return weight_map(p.weight, p.out_features, p.in_features, tile_rows, false);
  const auto bytes = static_cast<cuuint64_t>(p.in_features), rows = static_cast<cuuint64_t>(p.out_features);
  const cuuint64_t sizes[] = {bytes / 2, 2, 2, rows / 4}, strides[] = {bytes, rows / 2 * bytes, 2 * bytes};
  const cuuint32_t box[] = {kLineBytes / 2, 2, 2, static_cast<cuuint32_t>(tile_rows) / 4};
  return encode(p.weight, CU_TENSOR_MAP_DATA_TYPE_UINT16, CU_TENSOR_MAP_SWIZZLE_128B, 4, sizes, strides, box);
}

inline CUtensorMap wave_rows_map(const SkinnyLinearParams& p, int tokens, int lines) {
  const auto all_lines = static_cast<cuuint64_t>(p.in_features) / kLineBytes;
  const cuuint64_t sizes[] = {kLineBytes, static_cast<cuuint64_t>(p.num_tokens), all_lines},
                   strides[] = {all_lines * kLineBytes, kLineBytes};
  const cuuint32_t box[] = {kLineBytes, static_cast<cuuint32_t>(tokens), static_cast<cuuint32_t>(lines)};
  return encode(p.x, CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_128B, 3, sizes, strides, box);
}

template <class Size>
void launch_wave(const SkinnyLinearParams& p, int splits, Stream stream) {
  constexpr int64_t kMostShared = 220 * 1024;
  const int tokens = static_cast<int>(round_up(p.num_tokens, kTile)), line_bytes = tokens * kLineBytes;
  check(tokens <= Size::kTokens && tokens + Size::kRows >= Size::kTokens, "tile_linear: rows in e4m3");
  const int64_t pairs = ceil_div(ceil_div(p.in_features, kPieceLines * kLineBytes), splits);
  const int64_t stage_bytes = Size::kLines * (Size::kWeightBytes + line_bytes);
  const int64_t stages =
      std::min({int64_t{kMostStages}, pairs * kPieceLines / Size::kLines, kMostShared / stage_bytes});
  const int64_t parts = splits > 1 ? Size::kPartBytes : 0;
  launch(
      tile_wave_kernel<Size>,
      {.grid = {static_cast<unsigned>(splits), static_cast<unsigned>(ceil_div(p.out_features, Size::kRows))},
       .block = kWaveThreads,
       .shared_bytes = static_cast<size_t>(std::max(stages * stage_bytes, parts)),
       .cluster = static_cast<unsigned>(splits),
       .overlaps_previous = true},
      stream, WaveMaps{wave_weight_map(p, Size::kRows), wave_rows_map(p, tokens, Size::kLines)}, p,
      static_cast<int>(stages), line_bytes);
}

}  // namespace bequest::cuda::tiles
