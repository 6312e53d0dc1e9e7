// The kernel of tile_linear.h.
//
// A CTA has some rows of W and a piece of k; where rows are few, k is divided among the CTAs of a cluster, so
// that all multiprocessors read. The copy engine fills the stages of a ring: 128 bytes of each row of W, and
// the same k of x. It is asked for W before the predecessor has ended. Its two warpgroups have 64 or 128 rows
// of W each, against all tokens; where a CTA has 64, they take turns with the stages. Tensor cores take 64
// rows of W, which pass through registers where they are codes, and x where it lies. The sums meet at the
// end, always in the same order: those of the warpgroups by way of the ring's memory, those of the CTAs where
// they are finished (tile_parts.cuh).
//
// A norm needs no pass of its own: the product before multiplies its sums with the norm's weight, and leaves
// their squares, too (NormAhead). What these come to is a factor of the output.
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

  // REQUIRES: it is within two rounds
  __device__ __forceinline__ void wrap(int stages) {
    if (stage >= stages) stage -= stages, ++round;
  }
  __device__ __forceinline__ uint32_t parity() const { return round / 2 % 2; }
};

// A stage has two barriers, which take turns by rounds. Where slices take turns with an odd number of stages,
// the one that waits for a stage's next round may come before this round's bytes, which are the other
// slice's. A parity cannot tell the next round from the one before: with one barrier it would read what the
// stage had then. Two rounds ago the stage was its own.
struct Barriers {
  PhaseBarrier arrived[kMostStages][2];
  PhaseBarrier summed;             // all parts of the sums that the CTA finishes
  uint32_t readings[kMostStages];  // of a stage, by warps

  // By one thread.
  __device__ __forceinline__ void init(int stages) {
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      for (PhaseBarrier& barrier : arrived[stage]) barrier.init(1);
      readings[stage] = 0;
    }
    summed.init(1);
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

static_assert(sizeof(Barriers) <= 1024, "two CTAs take all of a multiprocessor's shared memory");

// Stages of W and x on their way to shared memory. Each call by one thread, where nothing else is said.
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

  // Before the predecessor has ended, by one thread.
  __device__ __forceinline__ void begin_weights(const Piece& piece, int stages) const {
    const int ahead = min(stages, piece.count);
#pragma unroll 1
    for (int i = 0; i < ahead; ++i) load_weights(piece.first + i, {i, 0});
  }
  // Behind its end, by all warps: one that asks for all of them takes longer than the copies.
  __device__ __forceinline__ void begin_rows(const Piece& piece, int stages) const {
    const int ahead = min(stages, piece.count);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) / kWarp; i < ahead; i += kThreads / kWarp)
      if (is_elected()) load_rows(piece.first + i, {i, 0});
    __syncwarp();
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

// Where the last stage of a slice lies: nobody else has a use for it when the slice has read it. One that has
// no unit has a stage all the same.
template <class Size>
__device__ __forceinline__ uint32_t last_stage(uint32_t address, int slice, const Piece& piece, int stages) {
  const int last =
      piece.count > slice ? (piece.count - 1 - slice) / Size::kSlices * Size::kSlices + slice : slice;
  return address + (last < stages || piece.count <= slice ? last : last % stages) * Size::kStageBytes;
}

// The stages that are a warpgroup's: the slices take turns. places: of stage 0
template <class Size>
__device__ __forceinline__ void multiply_piece(Sums<Size>& sums, int slice, const Ring<Size>& ring,
                                               Barriers& barriers, const Piece& piece, int stages,
                                               const StagePlaces& places) {
  const bool goes_round = piece.count > stages;
  // A stage that has been read, and its unit within the piece.
  const auto leave = [&](const RingPlace& at, int i) {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) ring.leave(at, piece.first + i + stages, i + stages < piece.count);
    __syncwarp();
  };
  RingPlace now{slice, 0}, last = now;
#pragma unroll 1
  for (int i = slice; i < piece.count; i += Size::kSlices) {
    now.wrap(stages);
    barriers.of(now).wait(now.parity());
    const uint32_t at = now.stage * Size::kStageBytes;
    sums.add({places.weights + at, places.rows + at, places.words + at + (piece.first + i) % 2 * 8});
    if (goes_round) {
      if constexpr (sums.kIsDone)
        leave(now, i);
      else if (i >= Size::kSlices)
        leave(last, i - Size::kSlices);
    }
    last = now;
    now.stage += Size::kSlices;
  }
  sums.finish();
}

// Where parts take the ring's place, until all CTAs of the cluster have read theirs.
template <class Size>
__device__ __forceinline__ void leave_ring(Sums<Size>& sums, const TileMemory& memory) {
  if (memory.has_parts_apart()) return;
  sums.settle();
  if (gridDim.x > 1)
    arrive_in_cluster(), await_cluster();
  else
    __syncthreads();
}

// grid (splits, tiles of rows of W · blocks of tokens), clusters of all splits
template <class Size, bool kNorm>
__device__ __forceinline__ void multiply_tile(const Maps& maps, const SkinnyLinearParams& p,
                                              const TileMemory& memory) {
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ Barriers barriers;
  let_next_start();
  constexpr int kUnit = Size::Format::kUnit;
  const Tile<Size> tile(p);
  const Piece piece(static_cast<int>(ceil_div(p.in_features, kUnit)), static_cast<int>(blockIdx.x),
                    static_cast<int>(gridDim.x));
  const uint32_t address = shared_address(shared);
  // The compiler then knows that it is the same in all lanes.
  const int warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  const Parts<Size, kNorm> parts(p, memory, address, barriers.summed, warpgroup);
  using Ways = typename Parts<Size, kNorm>::Ways;
  const bool is_cluster = gridDim.x > 1;
  if (threadIdx.x == 0) {
    prefetch_map(maps.rows);  // needed at once when the predecessor has ended
    barriers.init(memory.stages);
    parts.expect();
  }
  __syncthreads();
  if (is_cluster) arrive_in_cluster();
  const Ring<Size> ring(maps, address, barriers, tile.first_row, tile.first_token);
  if (threadIdx.x < kWarp && is_elected()) ring.begin_weights(piece, memory.stages);
  __syncwarp();
  Sums<Size> sums(warpgroup % Size::kReaders);
  uint32_t thread = threadIdx.x;
  Ways ways;
  parts.find(ways, thread);
  const Results<Size, kNorm> results(p, tile, parts, thread);
  const int slice = warpgroup / Size::kReaders;
  uint32_t mine = last_stage<Size>(address, slice, piece, memory.stages);
  uint32_t other = last_stage<Size>(address, Size::kSlices - 1 - slice, piece, memory.stages);
  if constexpr (Size::kSlices == 2 && Size::kHasRoom) asm volatile("" : "+r"(mine), "+r"(other));
  if (is_cluster) await_cluster();
  wait_for_previous();
  ring.begin_rows(piece, memory.stages);
  const auto squares = parts.begin_squares(tile.first_token, tile.num_tokens);
  const auto given = results.begin();
  multiply_piece(sums, slice, ring, barriers, piece, memory.stages,
                 {address, address + Size::kWeightBytes + Size::kGroupBytes, address + Size::kWeightBytes});
  if constexpr (Size::kSlices == 2) sums.add_other_slice(slice, mine, other);
  leave_ring(sums, memory);
  const auto finish = [&](const Ways& to, const Results<Size, kNorm>& found) {
    parts.send(sums, to);
    if constexpr (kNorm) parts.send_squares(squares);
    parts.await();
    found.store(given);
  };
  if constexpr (Size::kHasRoom) {
    finish(ways, results);
  } else {
    asm volatile("" : "+r"(thread));  // all is worked out again, and takes no registers meanwhile
    parts.find(ways, thread);
    finish(ways, Results<Size, kNorm>(p, tile, parts, thread));
  }
  if (kNorm && p.tap.ring_rows != nullptr) tap_rows(p, p.tapped, static_cast<int>(threadIdx.x), kThreads);
}

template <class Size, bool kNorm>
__global__ __launch_bounds__(kThreads, Size::kBlocks) void tile_linear_kernel(
    const __grid_constant__ Maps maps, const __grid_constant__ SkinnyLinearParams p,
    const __grid_constant__ TileMemory memory) {
  if constexpr (kIsHopper) multiply_tile<Size, kNorm>(maps, p, memory);
}

// --- on the host ----------------------------------------------------------------------------------------

// Of a CTA alone on its multiprocessor, and of one of two: the next kernel's begins beside it.
inline constexpr int kMostShared = 224 * 1024, kHalfShared = 112 * 1024;
inline constexpr int kLongPiece = 64;  // units of k

// What a product's CTAs need beside the ring.
struct TileNeeds {
  int units;         // stages that a ring has use for
  int parts, other;  // bytes
};

// Stages that there is room for: the parts take the ring's place.
template <class Size>
constexpr int stages_within(int bytes, const TileNeeds& needs) {
  const int room = bytes - needs.other;
  return needs.parts > room ? 0 : std::min({kMostStages, needs.units, room / Size::kStageBytes});
}

// Whether a CTA takes more than half of the memory where each has a multiprocessor to itself. The next kernel
// can then ask for less of its weights meanwhile. That pays for a long piece of k, and where all of a piece
// and of the parts find room: no stage is filled twice, and no CTA waits until the others have read theirs.
template <class Size>
bool is_alone(const TileNeeds& needs, int64_t ctas) {
  if (!Size::Format::kIsOperand || ctas > multiprocessors()) return false;
  const int whole = needs.units * Size::kStageBytes + needs.parts + needs.other;
  const bool is_whole = needs.units <= kMostStages && whole <= kMostShared;
  return needs.units >= kLongPiece || (Size::kTokens > 32 && is_whole);
}

// A ring needs one stage more than take turns with it, even if the CTA is then alone.
template <class Size>
TileMemory tile_memory(const TileNeeds& needs, int64_t ctas) {
  int bytes = kHalfShared, stages = stages_within<Size>(bytes, needs);
  if (Size::kBlocks == 1 || is_alone<Size>(needs, ctas) ||
      (stages < needs.units && stages <= Size::kSlices)) {
    bytes = kMostShared;
    stages = stages_within<Size>(bytes, needs);
  }
  const int ring = std::max(stages, Size::kSlices) * Size::kStageBytes;
  const bool apart = ring + needs.parts + needs.other <= bytes;
  TileMemory memory{};
  memory.stages = stages;
  memory.parts = apart ? ring : 0;
  memory.squares = apart ? ring + needs.parts : std::max(ring, needs.parts);
  return memory;
}

template <class Size, bool kNorm>
void launch_kernel(const SkinnyLinearParams& p, int splits, Stream stream) {
  constexpr int kUnit = Size::Format::kUnit, kBands = static_cast<int>(Bands<Size>::kCount);
  const int64_t units = ceil_div(p.in_features, kUnit), most_units = ceil_div(units, splits);
  const int64_t tiles = ceil_div(p.out_features, Size::kRows), blocks = ceil_div(p.num_tokens, Size::kTokens);
  const int halves = p.result == SkinnyResult::kGate ? 2 : 1;
  int share_bits = 0;
  while (splits << share_bits < kBands / halves) ++share_bits;
  const int squares = kNorm ? splits * Size::kSlices * Size::kTokens * 4 : 0;
  TileMemory memory =
      tile_memory<Size>({.units = static_cast<int>(most_units),
                         .parts = (halves << share_bits) * splits * static_cast<int>(Bands<Size>::kPartBytes),
                         .other = squares},
                        tiles * blocks * splits);
  memory.share_bits = share_bits;
  // A stage is filled again when the next one of its slice has been asked for.
  check(memory.stages >= most_units || memory.stages > Size::kSlices, "tile_linear: no room for a ring");
  launch(tile_linear_kernel<Size, kNorm>,
         {.grid = {static_cast<unsigned>(splits), static_cast<unsigned>(tiles * blocks)},
          .block = kThreads,
          .shared_bytes = static_cast<size_t>(memory.squares + squares),
          .cluster = static_cast<unsigned>(splits),
          .overlaps_previous = true},
         stream, maps_of<Size>(p), p, memory);
}

}  // namespace bequest::cuda::tiles
