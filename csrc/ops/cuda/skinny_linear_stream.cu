// Up to four rows: a stream of weights through a ring in shared memory, one CTA on each multiprocessor.
//
// A thread of its own asks the copy engine for the weights (skinny_stage.cuh). It begins before the
// predecessor has ended, because weights depend on nothing, and a ring holds what the memory brings in the
// time that the end of one kernel and the start of the next take; in a small model it holds all of a CTA's
// weights. So kernels follow each other without the memory ever being idle.
//
// Eight warps multiply. They divide k: of each 256, a warp has 32. Tensor cores take 16 rows of W, those of
// two stages, against 8 rows of x. A sum does not care for the order of its terms, so a lane takes 8
// neighbours along k of a row in one 16-byte access and calls them what the instruction wants them to be, the
// same for x and W: no shuffles. The warps' parts are added in a fixed order after each round of stages.
//
// Few and short rows of x are first copied to shared memory and normed there, by every CTA for itself; longer
// ones come from the L2 as they are needed. Bound by the bytes of W.
//
// Codes of 8 bits (e4m3) go the same way: a stage has twice as many values of k, and the 16 that a lane reads
// become bfloat16 in its registers.
#include <algorithm>

#include "device/barriers.cuh"
#include "device/copies.cuh"
#include "device/current_device.cuh"
#include "device/launch.cuh"
#include "device/pairs.cuh"
#include "device/reductions.cuh"
#include "device/shared_memory.cuh"
#include "device/tensor_core.cuh"
#include "device/vectors.cuh"
#include "ops/cuda/activation.cuh"
#include "ops/cuda/skinny_linear.cuh"
#include "ops/cuda/skinny_rows.cuh"
#include "ops/cuda/skinny_stream.cuh"

namespace bequest::cuda {
namespace {

// How tiles are divided: the first `longer` CTAs have one more than the others. By the host, because
// divisions would delay the first copies.
struct Division {
  int tiles_each, longer;
};

// Stages of the ring, and how many of them are on their way at once.
struct Depth {
  int stages, in_flight;
};

// The tiles of a CTA, and the stages they come in: all tiles of a round for one chunk of k, then the next.
struct Share {
  int first, end;  // tiles
  int chunks;

  __device__ Share(const SkinnyLinearParams& p, const Division& division, int stage_depth) {
    const int block = static_cast<int>(blockIdx.x);
    first = block * division.tiles_each + min(block, division.longer);
    end = first + division.tiles_each + (block < division.longer ? 1 : 0);
    chunks = (static_cast<int>(p.in_features) + stage_depth - 1) / stage_depth;
  }
};

struct Ring {
  PhaseBarrier full[kMostStages];   // the bytes of a stage are there
  PhaseBarrier empty[kMostStages];  // all warps have read them
};

// The stages of a share in order: of each pair of tiles a chunk of the first, then of the second.
class StageOrder {
 public:
  __device__ explicit StageOrder(const Share& share) : share_(share), pair_(share.first) {}

  __device__ bool done() const { return pair_ >= share_.end; }
  __device__ int tile() const { return pair_ + half_; }
  __device__ int chunk() const { return chunk_; }

  __device__ void advance() {
    half_ ^= 1;
    if (half_ == 1 && pair_ + 1 < share_.end) return;
    half_ = 0;
    if (++chunk_ < share_.chunks) return;
    chunk_ = 0;
    pair_ += 2;
  }

 private:
  const Share& share_;
  int pair_, half_ = 0, chunk_ = 0;
};

// --- the copies
// -------------------------------------------------------------------------------------------------------

// By one thread.
class Reader {
 public:
  __device__ Reader(const SkinnyLinearParams& p, const CUtensorMap& map, const Share& share, Ring& ring,
                    uint32_t ring_at, const Depth& depth)
      : map_(map),
        tile_rows_(p.result == SkinnyResult::kGate ? kTileRows / 2 : kTileRows),
        order_(share),
        ring_(ring),
        ring_at_(ring_at),
        depth_(depth),
        policy_(read_once_policy()) {}

  // As much as is on its way at once.
  __device__ void begin() {
#pragma unroll 1
    while (asked_ < depth_.in_flight && !order_.done()) copy();
  }

  // The rest.
  __device__ void finish() {
#pragma unroll 1
    while (!order_.done()) {
      ring_.full[arrived_.index].wait(arrived_.parity);
      arrived_.advance(depth_.stages);
      if (asked_ >= depth_.stages) ring_.empty[at_.index].wait(at_.parity ^ 1);
      copy();
    }
  }

 private:
  __device__ __forceinline__ void copy() {
    copy_stage(map_, ring_at_ + at_.index * kStageBytes, ring_.full[at_.index], order_.tile() * tile_rows_,
               order_.chunk() * kStageLines, policy_);
    order_.advance();
    at_.advance(depth_.stages);
    ++asked_;
  }

  const CUtensorMap& map_;
  const int tile_rows_;
  StageOrder order_;
  Ring& ring_;
  const uint32_t ring_at_;
  const Depth depth_;
  const uint64_t policy_;
  RingCursor at_, arrived_;
  int asked_ = 0;
};

// --- the warps that multiply
// ---------------------------------------------------------------------------------------------------

template <int kTokenTiles>
struct PairSum {
  float of[kTokenTiles][2][4] = {};  // two sums each, so that a product need not wait for the one before it
};

// A step of numbers: 8 of k of a lane.
__device__ __forceinline__ void multiply_step(float (&sum)[2][4], const uint4& a, const uint4& b,
                                              const uint4* x) {
  multiply_accumulate(sum[0], {a.x, b.x, a.y, b.y}, x->x, x->y);
  multiply_accumulate(sum[1], {a.z, b.z, a.w, b.w}, x->z, x->w);
}

// A step of codes: 16 of k of a lane.
__device__ __forceinline__ void multiply_codes(float (&sum)[2][4], const uint4& a, const uint4& b,
                                               const uint4* x) {
  const uint32_t low[4] = {a.x, a.y, a.z, a.w}, high[4] = {b.x, b.y, b.z, b.w};
  const uint32_t of_x[8] = {x[0].x, x[0].y, x[0].z, x[0].w, x[1].x, x[1].y, x[1].z, x[1].w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t first[2], second[2];
    fp8_to_bf16(low[i], first[0], first[1]);
    fp8_to_bf16(high[i], second[0], second[1]);
    multiply_accumulate(sum[i % 2], {first[0], second[0], first[1], second[1]}, of_x[2 * i], of_x[2 * i + 1]);
  }
}

// Adds the products of two tiles' stages, of at most `steps` steps; without a second tile its rows are zero.
template <int kTokenTiles, bool kCodes>
__device__ __forceinline__ void multiply_pair(uint32_t low, uint32_t high, bool both, int steps,
                                              const uint4 (&rows)[kTokenTiles][kChunkVectors<kCodes>],
                                              PairSum<kTokenTiles>& sum) {
  constexpr int kAtOnce = kSteps / kTokenTiles;
#pragma unroll
  for (int begin = 0; begin < kSteps; begin += kAtOnce) {
    uint4 a[kAtOnce], b[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      a[i] = b[i] = make_uint4(0, 0, 0, 0);
      if (begin + i < steps) a[i] = load_16(low + (begin + i) * kStepBytes);
      if (begin + i < steps && both) b[i] = load_16(high + (begin + i) * kStepBytes);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        const uint4* x = &rows[t][(begin + i) * kStepVectors<kCodes>];
        if constexpr (kCodes)
          multiply_codes(sum.of[t], a[i], b[i], x);
        else
          multiply_step(sum.of[t], a[i], b[i], x);
      }
  }
}

// What becomes of a round's sums. A thread has the elements threadIdx.x + [0, kElements) * kConsumers of
// [T, rows of W in a whole round]; what it needs for them is asked for when the round begins.
template <int kTokenTiles, bool kCodes>
class Results {
 public:
  // For the round that begins with this tile.
  __device__ void ask(const SkinnyLinearParams& p, int tile, int count) {
    const auto* bias = static_cast<const BFloat16*>(p.bias);
    if (!kCodes && bias == nullptr && p.result != SkinnyResult::kAdd) return;
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      const Element element(p, tile, count, e);
      if (!element.exists) continue;
      if (bias != nullptr) bias_[e] = widen(bias[element.output]);
      if (p.result == SkinnyResult::kGate && bias != nullptr)
        other_[e] = widen(bias[element.output + static_cast<int>(p.out_features / 2)]);
      if (p.result == SkinnyResult::kAdd) other_[e] = widen(static_cast<const BFloat16*>(p.out)[element.at]);
      if constexpr (kCodes) {
        scale_[e] = __ldg(p.scales + element.output);
        if (p.result == SkinnyResult::kGate)
          other_scale_[e] = __ldg(p.scales + element.output + p.out_features / 2);
      }
    }
  }

  // parts: [kWarps, T, kPartPitch], the sums of each warp
  __device__ void store(const SkinnyLinearParams& p, int tile, int count, const float* parts) const {
    const int warp_stride = p.num_tokens * kPartPitch<kTokenTiles>;
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      const Element element(p, tile, count, e);
      if (!element.exists) continue;
      const float* part = parts + element.token * kPartPitch<kTokenTiles> + element.place;
      float value = rounded<BFloat16>(total(part, warp_stride) * scale(scale_, e) + bias_[e]);
      if (p.result == SkinnyResult::kGate) {
        const float up =
            rounded<BFloat16>(total(part + kTileRows / 2, warp_stride) * scale(other_scale_, e) + other_[e]);
        value = gate(p.activation, value, up);
      } else {
        value += other_[e];
      }
      static_cast<BFloat16*>(p.out)[element.at] = narrow<BFloat16>(value);
    }
  }

 private:
  static constexpr int kPlaces = kRoundTiles<kTokenTiles> * kTileRows;
  static constexpr int kElements = kTokenTiles * kTokenTile * kPlaces / kConsumers;

  struct Element {
    int token, place, output;
    int64_t at;
    bool exists;

    __device__ Element(const SkinnyLinearParams& p, int tile, int count, int e) {
      const int i = threadIdx.x + e * kConsumers;
      token = i / kPlaces;
      place = i % kPlaces;
      const SkinnyOutput of_tile(p, tile + place / kTileRows, place % kTileRows);
      output = of_tile.index;
      exists = token < p.num_tokens && place < count * kTileRows && of_tile.exists;
      at = int64_t{token} * of_tile.stride + output;
    }
  };

  __device__ static float total(const float* part, int warp_stride) {
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += part[warp * warp_stride];
    return sum;
  }

  __device__ static float scale(const float (&scales)[kElements], int e) { return kCodes ? scales[e] : 1.0f; }

  float scale_[kElements] = {}, other_scale_[kElements] = {};  // of the row's codes, and of up's
  float bias_[kElements] = {};
  float other_[kElements] = {};  // what is added, or the bias of up
};

template <int kTokenTiles, int kVectors>
__device__ __forceinline__ void copy_rows(const uint4 (&from)[kTokenTiles][kVectors],
                                          uint4 (&to)[kTokenTiles][kVectors]) {
#pragma unroll
  for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
    for (int i = 0; i < kVectors; ++i) to[t][i] = from[t][i];
}

// The sums of the tiles `first` and `first` + 1 of a round.
template <int kTokenTiles>
__device__ __forceinline__ void store_parts(const PairSum<kTokenTiles>& sum, int first, int num_tokens,
                                            float* parts) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
  for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = t * kTokenTile + lane % 4 * 2 + i % 2;
      const int output = first * kTileRows + i / 2 * kTileRows + row_of_lane(lane);
      if (token < num_tokens)
        parts[(warp * num_tokens + token) * kPartPitch<kTokenTiles> + output] =
            sum.of[t][0][i] + sum.of[t][1][i];
    }
}

template <int kTokenTiles, bool kStaged, bool kCodes>
__device__ void multiply(const SkinnyLinearParams& p, const Share& share, const Places& places,
                         const RowVectors& mine, Ring& ring, int stages, uint8_t* shared) {
  constexpr int kTiles = kRoundTiles<kTokenTiles>;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const uint32_t lane_at = shared_address(shared) + lane_in_stage(warp, lane);
  const int steps = static_cast<int>(p.in_features) / kStepDepth<kCodes>;
  const Rows<kTokenTiles, kStaged, kCodes> x(p, places, shared);
  auto* parts = reinterpret_cast<float*>(shared + places.parts);
  Results<kTokenTiles, kCodes> results;
  results.ask(p, share.first, min(kTiles, share.end - share.first));
  if constexpr (kStaged) stage_rows<kTokenTiles>(p, places, mine, shared);
  RingCursor at;
  uint4 ahead[kTokenTiles]
             [kChunkVectors<kCodes>];  // what comes from the L2 is asked for a chunk before it is used
  if constexpr (!kStaged) x.load(0, ahead);
  // Loops stay loops: most kernels are so short that fetching their instructions is much of their time.
#pragma unroll 1
  for (int tile = share.first; tile < share.end; tile += kTiles) {
    const int count = min(kTiles, share.end - tile);
#pragma unroll 1
    for (int first = 0; first < count; first += 2) {
      const bool both = first + 1 < count;
      PairSum<kTokenTiles> sum;
#pragma unroll 1
      for (int chunk = 0; chunk < share.chunks; ++chunk) {
        uint4 rows[kTokenTiles][kChunkVectors<kCodes>];
        if constexpr (kStaged) {
          x.load(chunk, rows);
        } else {
          copy_rows(ahead, rows);
          x.load(chunk + 1 < share.chunks ? chunk + 1 : 0, ahead);
        }
        const int low = at.index;
        ring.full[low].wait(at.parity);
        at.advance(stages);
        const int high = at.index;
        if (both) {
          ring.full[high].wait(at.parity);
          at.advance(stages);
        }
        multiply_pair<kTokenTiles, kCodes>(lane_at + low * kStageBytes, lane_at + high * kStageBytes, both,
                                           steps - chunk * kSteps, rows, sum);
        __syncwarp();
        if (lane == 0) {
          ring.empty[low].arrive();
          if (both) ring.empty[high].arrive();
        }
      }
      store_parts(sum, first, p.num_tokens, parts);
    }
    sync_consumers();
    results.store(p, tile, count, parts);
    if (tile + kTiles >= share.end) break;
    results.ask(p, tile + kTiles, min(kTiles, share.end - tile - kTiles));
    sync_consumers();  // the parts have been read
  }
}

template <int kTokenTiles, bool kStaged, bool kCodes>
__global__ __launch_bounds__(kThreads,
                             kTokenTiles == 1 && kStaged && !kCodes ? 3
                             : (kTokenTiles == 1 && !kCodes) || kStaged
                                 ? 2
                                 : 1) void skinny_stream_kernel(const __grid_constant__ SkinnyLinearParams p,
                                                                const __grid_constant__ CUtensorMap map,
                                                                Division division, Depth depth) {
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ Ring ring;
  const Places places(p, kStaged, kPartPitch<kTokenTiles>, depth.stages);
  const Share share(p, division, kSteps * kStepDepth<kCodes>);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  let_next_start();
  if (threadIdx.x == kConsumers) {
#pragma unroll 1
    for (int i = 0; i < depth.stages; ++i) {
      ring.full[i].init(1);
      ring.empty[i].init(kWarps);
    }
    publish_barriers();
  }
  __syncthreads();
  if (warp == kWarps) {
    Reader reader(p, map, share, ring, shared_address(shared), depth);
    if (lane == 0) reader.begin();
    if (p.tap.ring_rows != nullptr) {
      __syncwarp();
      wait_for_previous();
      tap_rows(p, p.x, lane, kWarp);
    }
    if (lane == 0) reader.finish();
    return;
  }
  stage_gain(p, reinterpret_cast<uint4*>(shared + places.gain));
  const RowVectors mine(p);
  wait_for_previous();
  multiply<kTokenTiles, kStaged, kCodes>(p, share, places, mine, ring, depth.stages, shared);
}

template <int kTokenTiles, bool kStaged, bool kCodes>
void launch_stream(const SkinnyLinearParams& p, Stream stream) {
  const int64_t tiles = skinny_tiles(p), grid = std::min<int64_t>(tiles, multiprocessors());
  const int64_t stages_of_share =
      ceil_div(tiles, grid) * ceil_div(p.in_features, kSteps * kStepDepth<kCodes>);
  const int beside = Places(p, kStaged, kPartPitch<kTokenTiles>, 0).total;
  const int beside_another = (kSharedBytes - beside) / kStageBytes,
            alone = (kMostSharedBytes - beside) / kStageBytes;
  const bool shares = beside_another >= kFewestStages && stages_of_share < kLongShare;
  const int fitting = shares ? std::min(beside_another, kMostStages) : std::min(alone, kStagesAlone);
  const int stages = static_cast<int>(std::min<int64_t>(fitting, stages_of_share));
  const LaunchShape shape{
      .grid = static_cast<unsigned>(grid),
      .block = kThreads,
      .shared_bytes = static_cast<size_t>(Places(p, kStaged, kPartPitch<kTokenTiles>, stages).total),
      .overlaps_previous = true};
  const Division division{static_cast<int>(tiles / grid), static_cast<int>(tiles % grid)};
  const Depth depth{stages, std::min(stages, kMostInFlight)};
  const CUtensorMap map = weight_map(p.weight, p.out_features, p.in_features / kStepVectors<kCodes>,
                                     p.result == SkinnyResult::kGate);
  launch(skinny_stream_kernel<kTokenTiles, kStaged, kCodes>, shape, stream, p, map, division, depth);
}

bool is_staged(int num_tokens, int64_t in_features) {
  return num_tokens * in_features * 2 <= kMostStagedBytes;
}

}  // namespace

bool skinny_stream_norms(int num_tokens, int64_t in_features) { return is_staged(num_tokens, in_features); }

void skinny_linear_stream(const SkinnyLinearParams& p, Stream stream) {
  const bool staged = is_staged(p.num_tokens, p.in_features);
  if (p.scales != nullptr)
    return staged ? launch_stream<1, true, true>(p, stream) : launch_stream<1, false, true>(p, stream);
  staged ? launch_stream<1, true, false>(p, stream) : launch_stream<1, false, false>(p, stream);
}

}  // namespace bequest::cuda
