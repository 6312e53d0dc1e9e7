// The kernel of tile_linear.h.
//
// A CTA has some rows of W and a piece of k; where rows are few, k is divided among the CTAs of a cluster, so
// that all multiprocessors read. The copy engine fills the stages of a ring: 128 bytes of each row of W, and
// the same k of x. It is asked for W before the predecessor has ended. Its two warpgroups have 64 or 128 rows
// of W each, against all tokens; where a CTA has 64, they take turns with the stages. Tensor cores take 64
// rows of W, which pass through registers where they are codes, and x where it lies. The sums meet at the
// end, always in the same order: those of the warpgroups in the ring's memory, those of the CTAs through the
// cluster's.
//
// A norm needs no pass of its own: its weight is multiplied into W on the way, the sum of squares is one more
// result, and what it comes to is a factor of the output.
#pragma once

#include <algorithm>

#include "device/barriers.cuh"
#include "device/copies.cuh"
#include "device/current_device.cuh"
#include "device/launch.cuh"
#include "ops/cuda/skinny_norm.cuh"
#include "ops/cuda/tile_linear.h"
#include "ops/cuda/tile_maps.cuh"
#include "ops/cuda/tile_results.cuh"
#include "ops/cuda/tile_sums.cuh"

namespace bequest::cuda::tiles {

// A stage of the ring in one of its rounds.
struct RingPlace {
  int stage, round;

  __device__ __forceinline__ void wrap(int stages) {
    while (stage >= stages) stage -= stages, ++round;
  }
  __device__ __forceinline__ uint32_t parity() const { return round / 2 % 2; }
};

// A stage has two barriers, which take turns by rounds. Where slices take turns with an odd number of stages,
// the one that waits for a stage's next round may come before this round's bytes, which are the other
// slice's. A parity cannot tell the next round from the one before: with one barrier it would read what the
// stage had then. Two rounds ago the stage was its own.
struct Barriers {
  PhaseBarrier arrived[kMostStages][2];
  uint32_t readings[kMostStages];  // of a stage, by warps

  // By one thread.
  __device__ __forceinline__ void init(int stages) {
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      for (PhaseBarrier& barrier : arrived[stage]) barrier.init(1);
      readings[stage] = 0;
    }
    publish_barriers();
  }

  __device__ __forceinline__ PhaseBarrier& of(const RingPlace& at) { return arrived[at.stage][at.round % 2]; }

  // By one thread of each warp that has read the stage: whether it was the last of `warps`.
  __device__ __forceinline__ bool is_last_reader(int stage, uint32_t warps) {
    uint32_t before;
    asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "r"(shared_address(&readings[stage]))
                 : "memory");
    return (before + 1) % warps == 0;
  }
};

// Stages of W and x on their way to shared memory. Each call by one thread.
template <class Size>
class Ring {
 public:
  // row: of W (of each half, of a gated product); token: of x
  __device__ Ring(const Maps& maps, uint32_t address, Barriers& barriers, int row, int token)
      : maps_(maps), address_(address), barriers_(barriers), row_(row), token_(token) {}

  __device__ __forceinline__ void load_weights(int unit, const RingPlace& at) const {
    const uint32_t to = address_ + at.stage * Size::kStageBytes;
    PhaseBarrier& arrived = barriers_.of(at);
    const uint64_t policy = read_once_policy();
    arrived.arrive_expecting(Size::kStageBytes);
    copy_box(maps_.weight, to, arrived, {unit * (kLineBytes / 2), row_, 0, 0}, policy);
    if constexpr (Size::Format::kGrouped)
      copy_box(maps_.words, to + Size::kWeightBytes, arrived, {unit / 2 * 4, row_, 0, 0}, policy);
  }
  __device__ __forceinline__ void load_rows(int unit, const RingPlace& at) const {
    const uint32_t to = address_ + at.stage * Size::kStageBytes + Size::kWeightBytes + Size::kGroupBytes;
    copy_box(maps_.rows, to, barriers_.of(at), 0, token_, unit * Size::kBatches);
  }

  // W before the predecessor has ended.
  __device__ __forceinline__ void begin(const Piece& piece, int stages) const {
    const int ahead = min(stages, piece.count);
#pragma unroll 1
    for (int i = 0; i < ahead; ++i) load_weights(piece.first + i, {i, 0});
    wait_for_previous();
#pragma unroll 1
    for (int i = 0; i < ahead; ++i) load_rows(piece.first + i, {i, 0});
  }

  // By one thread of each warp that has read the stage. The last one asks for what comes into its place.
  __device__ __forceinline__ void leave(const RingPlace& at, int unit, bool has_next) const {
    if (!has_next || !barriers_.is_last_reader(at.stage, 4 * Size::kReaders)) return;
    const RingPlace next{at.stage, at.round + 1};
    load_weights(unit, next);
    load_rows(unit, next);
  }

 private:
  const Maps& maps_;
  const uint32_t address_;
  Barriers& barriers_;
  const int row_, token_;
};

// The stages that are a warpgroup's: the slices take turns. places: of stage 0, and of the norm's first
// weight
template <class Size, bool kNorm>
__device__ __forceinline__ void multiply_piece(Sums<Size, kNorm>& sums, const Ring<Size>& ring,
                                               Barriers& barriers, const Piece& piece, int stages,
                                               const StagePlaces& places) {
  constexpr int kUnit = Size::Format::kUnit;
  const int warpgroup = threadIdx.x / kWarpgroup, reader = warpgroup % Size::kReaders;
  RingPlace now{warpgroup / Size::kReaders, 0};
  // A stage that has been read, and its unit within the piece.
  const auto leave = [&](const RingPlace& at, int i) {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) ring.leave(at, piece.first + i + stages, i + stages < piece.count);
    __syncwarp();
  };
  RingPlace last = now;
#pragma unroll 1
  for (int i = now.stage; i < piece.count; i += Size::kSlices) {
    now.wrap(stages);
    barriers.of(now).wait(now.parity());
    const uint32_t at = now.stage * Size::kStageBytes;
    sums.add({places.weights + at, places.rows + at, places.words + at + (piece.first + i) % 2 * 8,
              places.gain + i * (kUnit * 2)},
             reader);
    if (sums.kIsDone)
      leave(now, i);
    else if (i >= Size::kSlices)
      leave(last, i - Size::kSlices);
    last = now;
    now.stage += Size::kSlices;
  }
  sums.finish();
}

// Before the predecessor has ended: the norm's weight to shared memory, zeros beyond its end.
template <int kUnit>
__device__ __forceinline__ void stage_gain(const SkinnyLinearParams& p, const Piece& piece, uint4* gain) {
  const int vectors = static_cast<int>(p.in_features) / 8, first = piece.first * (kUnit / 8);
#pragma unroll 1
  for (int i = threadIdx.x; i < piece.count * (kUnit / 8); i += kThreads)
    gain[i] = first + i < vectors ? __ldg(static_cast<const uint4*>(p.norm_weight) + first + i)
                                  : make_uint4(0, 0, 0, 0);
}

// grid (splits, tiles of rows of W · blocks of tokens), clusters of all splits
template <class Size, bool kNorm>
__device__ __forceinline__ void multiply_tile(const Maps& maps, const SkinnyLinearParams& p, int stages) {
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ Barriers barriers;
  let_next_start();
  constexpr int kUnit = Size::Format::kUnit;
  const int blocks = static_cast<int>(ceil_div(p.num_tokens, Size::kTokens));
  const int tile = static_cast<int>(blockIdx.y) / blocks, block = static_cast<int>(blockIdx.y) % blocks;
  const Piece piece(static_cast<int>(ceil_div(p.in_features, kUnit)), static_cast<int>(blockIdx.x),
                    static_cast<int>(gridDim.x));
  const uint32_t address = shared_address(shared), squares = address + Size::squares(stages);
  if (threadIdx.x == 0) {
    prefetch_map(maps.rows);  // needed at once when the predecessor has ended
    barriers.init(stages);
  }
  if constexpr (kNorm) stage_gain<kUnit>(p, piece, reinterpret_cast<uint4*>(shared + Size::gain(stages)));
  __syncthreads();
  const int tile_rows = p.result == SkinnyResult::kGate ? Size::kRows / 2 : Size::kRows;
  const Ring<Size> ring(maps, address, barriers, tile * tile_rows, block * Size::kTokens);
  if (threadIdx.x < kWarp && is_elected()) ring.begin(piece, stages);
  __syncwarp();
  wait_for_previous();
  const uint32_t before = Results<Size>(p, tile, block, address, squares).begin();
  Sums<Size, kNorm> sums;
  multiply_piece(sums, ring, barriers, piece, stages,
                 {address, address + Size::kWeightBytes + Size::kGroupBytes, address + Size::kWeightBytes,
                  address + Size::gain(stages)});
  __syncthreads();  // all of the ring has been read
  const Results<Size> results(p, tile, block, address, squares);
  auto *parts = reinterpret_cast<float*>(shared),
       *sums_of_squares = reinterpret_cast<float*>(shared + Size::squares(stages));
  leave(sums, parts, sums_of_squares);
  __syncthreads();
  add_slices<Size>(parts, sums_of_squares, results.num_tokens(), kNorm);
  sync_parts();
  results.store(before);
  if (kNorm && p.tap.ring_rows != nullptr) tap_rows(p, static_cast<int>(threadIdx.x), kThreads);
  sync_parts();  // nobody leaves whose memory is still read
}

template <class Size, bool kNorm>
__global__ __launch_bounds__(kThreads, Size::kBlocks) void tile_linear_kernel(
    const __grid_constant__ Maps maps, const __grid_constant__ SkinnyLinearParams p, const int stages) {
  if constexpr (kIsHopper) multiply_tile<Size, kNorm>(maps, p, stages);
}

// --- on the host ----------------------------------------------------------------------------------------

// Of a CTA alone on its multiprocessor, and of one of two: the next kernel's begins beside it.
inline constexpr int kMostShared = 224 * 1024, kHalfShared = 112 * 1024;

template <class Size>
constexpr int stages_within(int bytes, int units, int gain_bytes) {
  int stages = std::min({kMostStages, units, (bytes - gain_bytes) / Size::kStageBytes});
  while (stages > 0 && Size::gain(stages) + gain_bytes > bytes) --stages;
  return stages;
}

// Stages that a CTA has room for. units: of its piece. A ring needs one more than take turns with it, even if
// the CTA is then alone.
template <class Size>
constexpr int stages_for(int units, int gain_bytes) {
  const int beside = stages_within<Size>(kHalfShared, units, gain_bytes);
  if (Size::kBlocks == 2 && (beside == units || beside > Size::kSlices)) return beside;
  return stages_within<Size>(kMostShared, units, gain_bytes);
}

template <class Size, bool kNorm>
void launch_kernel(const SkinnyLinearParams& p, int splits, Stream stream) {
  constexpr int kUnit = Size::Format::kUnit;
  const int64_t units = ceil_div(p.in_features, kUnit), most_units = ceil_div(units, splits);
  const int64_t tiles = ceil_div(p.out_features, Size::kRows), blocks = ceil_div(p.num_tokens, Size::kTokens);
  const int gain = kNorm ? static_cast<int>(most_units) * kUnit * 2 : 0;
  const int stages = stages_for<Size>(static_cast<int>(most_units), gain);
  // A stage is filled again when the next one of its slice has been asked for.
  check(stages >= most_units || stages > Size::kSlices, "tile_linear: no room for a ring");
  launch(tile_linear_kernel<Size, kNorm>,
         {.grid = {static_cast<unsigned>(splits), static_cast<unsigned>(tiles * blocks)},
          .block = kThreads,
          .shared_bytes = static_cast<size_t>(Size::gain(stages) + gain),
          .cluster = static_cast<unsigned>(splits),
          .overlaps_previous = true},
         stream, maps_of<Size>(p), p, stages);
}

}  // namespace bequest::cuda::tiles
