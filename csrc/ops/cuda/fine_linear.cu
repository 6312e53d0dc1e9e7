// Eight warps have 128 or 256 rows of W, 16 or 32 each, and a piece of k. Stages of 128 bytes of each row,
// the words of its groups, and x as float16 come into a ring in shared memory. Tensor cores take 16 rows of W
// against 8 tokens; codes become float16 in registers, with their scales: what is summed needs a factor of
// its row alone.
//
// The order of k is free as long as both sides have the same. Codes lie so that x can lie as it is.
#include <algorithm>

#include "core/dtype.h"
#include "device/copies.cuh"
#include "device/current_device.cuh"
#include "device/fine_values.cuh"
#include "device/launch.cuh"
#include "device/reductions.cuh"
#include "device/shared_memory.cuh"
#include "device/tensor_core.cuh"
#include "device/vectors.cuh"
#include "ops/cuda/fine_experts.h"
#include "ops/cuda/fine_linear.h"
#include "ops/cuda/summed_parts.h"
#include "ops/cuda/unit_walk.cuh"

namespace bequest::cuda {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kMostSharedBytes = 226 * 1024;
constexpr int kRowBytes = 128;  // of a stage
constexpr int kReads = 2;       // of 16 bytes of a lane, of a stage
constexpr int kTile = 8;        // tokens

// What a launch multiplies. Without a plan all rows are those of one matrix.
struct Work {
  FineLinearParams p;
  ExpertPlan plan;
  bool has_plan;
  int pairs_of_row;  // pairs that share a row of x
  int subs;          // tiles of tokens that a tile of the plan is
};

template <class Codec, int kTokenTiles, int kRowTiles>
struct Shape {
  static constexpr int kRows = kWarps * 16 * kRowTiles;
  static constexpr int kTokens = kTokenTiles * kTile;
  static constexpr int kOfRead = Codec::kGroups * 32;  // of k
  static constexpr int kUnit = kReads * kOfRead;
  static constexpr int kCodeBytes = kRows * kRowBytes;
  static constexpr int kRowWords = kReads * Codec::kWords;
  static constexpr int kWordBytes = kRows * kRowWords * 4;
  static constexpr int kTokenPitch = kUnit * 2 + 64;  // two tokens that are read at once: different banks
  static constexpr int kStageBytes = kCodeBytes + kWordBytes + kTokens * kTokenPitch;
  static constexpr int kBlocks = kRowTiles == 1 ? 2 : 1;  // of a multiprocessor, at least
  static constexpr int kStages = 3 * kStageBytes * kBlocks <= kMostSharedBytes ? 3 : 2;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kSharedBytes * kBlocks <= kMostSharedBytes);
};

// The rows of a CTA's tile.
struct Tile {
  int matrix, count;
  int64_t first;         // row of the result, or place in the plan's order
  const int32_t* order;  // of the plan, or null

  __device__ int64_t row(int token) const {
    return order == nullptr ? first + token : __ldcg(order + first + token);
  }
};

// False: there is no such tile.
template <int kTokens>
__device__ __forceinline__ bool find_tile(const Work& w, Tile& tile) {
  const int index = static_cast<int>(blockIdx.y);
  if (!w.has_plan) {
    tile = {0, static_cast<int>(min(int64_t{kTokens}, w.p.num_rows - int64_t{index} * kTokens)),
            int64_t{index} * kTokens, nullptr};
    return true;
  }
  const int of_plan = index / w.subs;
  if (of_plan >= __ldcg(w.plan.num_tiles)) return false;
  const int4 run = __ldcg(reinterpret_cast<const int4*>(w.plan.runs) + of_plan);  // an ExpertRun
  const int begin = (of_plan - run.w) * w.plan.tile_rows + index % w.subs * kTokens;
  tile = {run.x, min(kTokens, run.z - begin), run.y + begin, w.plan.order};
  return tile.count > 0;
}

// Asks for a unit of k of all rows of the CTA, and of x. By the whole block.
template <class Codec, class S>
class Loader {
 public:
  __device__ Loader(const Work& w, const Tile& tile, const int32_t* rows, uint32_t ring)
      : p_(w.p), rows_(rows), ring_(ring), policy_(read_once_policy()) {
    const FineMatrices& m = p_.matrices;
    units_ = static_cast<int>(ceil_div(m.in_features, kFineUnit) * (kFineUnit / S::kUnit));
    const int64_t first = tile.matrix * m.out_features;
    codes_ = static_cast<const uint8_t*>(m.codes) + first * units_ * kRowBytes;
    words_ = m.words + first * units_ * S::kRowWords;
  }

  __device__ __forceinline__ int units() const { return units_; }

  __device__ __forceinline__ void load_weights(int unit, int stage) const {
    constexpr int kPieces = kRowBytes / 16;  // of a row
    const uint32_t to = ring_ + stage * S::kStageBytes, words_to = to + S::kCodeBytes;
#pragma unroll
    for (int i = threadIdx.x; i < S::kRows * kPieces; i += kThreads) {
      const int row = i / kPieces, piece = i % kPieces;
      copy_16_once_async(to + row * kRowBytes + (piece ^ row % 2 * 4) * 16,
                         codes_ + (row_of(row) * units_ + unit) * kRowBytes + piece * 16, true, policy_);
    }
    constexpr int kWide = S::kRowWords % 4 == 0 ? 4 : 1, kParts = S::kRowWords / kWide;
#pragma unroll
    for (int i = threadIdx.x; i < S::kRows * kParts; i += kThreads) {
      const int row = i / kParts, at = i % kParts * kWide;
      const uint32_t* from = words_ + (row_of(row) * units_ + unit) * S::kRowWords + at;
      const uint32_t place = words_to + (row * S::kRowWords + at) * 4;
      if constexpr (kWide == 4)
        copy_16_async(place, from, true);
      else
        copy_4_async(place, from);
    }
  }

  // Beyond the end of a row x is zeros.
  __device__ __forceinline__ void load_rows(int unit, int stage) const {
    constexpr int kPieces = S::kUnit / 8;  // of a token
    const uint32_t to = ring_ + stage * S::kStageBytes + S::kCodeBytes + S::kWordBytes;
    const auto* x = static_cast<const uint16_t*>(p_.halves);
#pragma unroll
    for (int i = threadIdx.x; i < S::kTokens * kPieces; i += kThreads) {
      const int token = i / kPieces, piece = i % kPieces;
      const int64_t at = int64_t{unit} * S::kUnit + piece * 8;
      const bool exists = at < p_.matrices.in_features;
      copy_16_async(to + token * S::kTokenPitch + piece * 16,
                    x + rows_[token] * p_.matrices.in_features + (exists ? at : 0), exists);
    }
  }

 private:
  // Rows beyond the last are the last; nobody stores what becomes of them.
  __device__ __forceinline__ int64_t row_of(int row) const {
    return min(int64_t{blockIdx.x} * S::kRows + row, p_.matrices.out_features - 1);
  }

  const FineLinearParams& p_;
  const int32_t* const rows_;
  const uint32_t ring_;
  const uint64_t policy_;
  int units_;
  const uint8_t* codes_;
  const uint32_t* words_;
};

// The sums of a warp: tiles of 16 rows of W by tokens.
template <class Codec, class S, int kTokenTiles, int kRowTiles>
struct Sums {
  float of[kRowTiles][kTokenTiles][4] = {};

  int used;  // of the tiles of tokens, which are fewer where an expert has few rows, or few are left

  __device__ explicit Sums(int count) : used((count + kTile - 1) / kTile) {}

  // A unit of k. at: the warp's first row and the lane's place in it; x: the lane's place in its first token
  __device__ __forceinline__ void add(uint32_t at, uint32_t words_at, uint32_t x, int row, int lane) {
#pragma unroll
    for (int read = 0; read < kReads; ++read) {
      uint32_t codes[2 * kRowTiles][4], words[2 * kRowTiles][Codec::kWords];
#pragma unroll
      for (int r = 0; r < 2 * kRowTiles; ++r) {
        // Lanes are served eight at a time: two rows, which lie in different banks.
        load_16(codes[r], at + (row + r * 8) * kRowBytes + ((read * 4 + lane % 4) ^ row % 2 * 4) * 16);
        const uint32_t from = words_at + ((row + r * 8) * S::kRowWords + read * Codec::kWords) * 4;
        if constexpr (Codec::kWords == 4)
          load_16(words[r], from);
        else if constexpr (Codec::kWords == 2)
          load_8(words[r], from);
        else
          words[r][0] = load_4(from);
      }
#pragma unroll
      for (int group = 0; group < Codec::kGroups; ++group)
        add_group(codes, words, group, lane % 4 < 2 ? kFirstTwice : kSecondTwice,
                  x + read * (S::kOfRead * 2) + group * 64);
    }
  }

 private:
  __device__ __forceinline__ void add_group(const uint32_t (&codes)[2 * kRowTiles][4],
                                            const uint32_t (&words)[2 * kRowTiles][Codec::kWords], int group,
                                            uint32_t half, uint32_t x) {
    uint32_t pairs[2 * kRowTiles][4];
#pragma unroll
    for (int r = 0; r < 2 * kRowTiles; ++r) Codec::widen(codes[r], words[r], group, half, pairs[r]);
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
      if (t > 0 && (t == kTokenTiles / 4 || t == kTokenTiles / 2) && t >= used) break;
      const uint4 right = load_16(x + t * (kTile * S::kTokenPitch));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const auto& low = pairs[2 * m];
        const auto& high = pairs[2 * m + 1];
        multiply_accumulate_f16(of[m][t], {low[0], high[0], low[1], high[1]}, right.x, right.y);
        multiply_accumulate_f16(of[m][t], {low[2], high[2], low[3], high[3]}, right.z, right.w);
      }
    }
  }
};

__device__ __forceinline__ float bias_of(const Work& w, int64_t of_all, int64_t row) {
  if (w.p.bias == nullptr) return 0.0f;
  return w.has_plan ? static_cast<const float*>(w.p.bias)[of_all]
                    : widen(static_cast<const BFloat16*>(w.p.bias)[row]);
}

// What a lane has summed: as numbers where it is all, and to its piece's part of the scratch where not.
template <class Codec, class S, int kTokenTiles, int kRowTiles>
__device__ __forceinline__ void store(const Work& w, const Tile& tile,
                                      const Sums<Codec, S, kTokenTiles, kRowTiles>& sums, int warp,
                                      int lane) {
  const FineLinearParams& p = w.p;
  const int64_t rows = p.matrices.out_features;
  const bool whole = gridDim.z == 1;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t row =
          int64_t{blockIdx.x} * S::kRows + warp * (16 * kRowTiles) + m * 16 + i / 2 * 8 + lane / 4;
      if (row >= rows) continue;
      const int64_t of_all = tile.matrix * rows + row;
      const float scale = __ldg(p.matrices.scales + of_all) / kBesideCodes;
      const float added = whole ? bias_of(w, of_all, row) : 0.0f;
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        const int token = t * kTile + lane % 4 * 2 + i % 2;
        if (token >= tile.count) continue;
        const int64_t at = tile.row(token) * rows + row;
        const float y = sums.of[m][t][i] * scale + added;
        if (whole)
          static_cast<BFloat16*>(p.out)[at] = narrow<BFloat16>(y);
        else
          p.parts[blockIdx.z * (p.num_rows * rows) + at] = y;
      }
    }
}

// grid (N / rows, tiles of tokens, pieces of k)
template <class Codec, int kTokenTiles, int kRowTiles>
__global__ __launch_bounds__(kThreads, Shape<Codec, kTokenTiles, kRowTiles>::kBlocks) void fine_linear_kernel(
    const __grid_constant__ Work w) {
  using S = Shape<Codec, kTokenTiles, kRowTiles>;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ int32_t rows[S::kTokens];
  let_next_start();
  if (w.has_plan) wait_for_previous();
  Tile tile;
  if (!find_tile<S::kTokens>(w, tile)) return;
  // Columns beyond the last row of x are the last; nobody stores what becomes of them.
  if (threadIdx.x < S::kTokens)
    rows[threadIdx.x] =
        static_cast<int32_t>(tile.row(min(static_cast<int>(threadIdx.x), tile.count - 1)) / w.pairs_of_row);
  const uint32_t ring = shared_address(shared);
  const Loader<Codec, S> loader(w, tile, rows, ring);
  const UnitWalk<S::kStages, Loader<Codec, S>> walk(loader, loader.units(), static_cast<int>(blockIdx.z),
                                                    static_cast<int>(gridDim.z));
  walk.begin_weights();
  if (!w.has_plan) wait_for_previous();
  __syncthreads();  // rows are known
  walk.begin_rows();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int row = warp * (16 * kRowTiles) + lane / 4;  // the lane's first; others are 8 apart
  Sums<Codec, S, kTokenTiles, kRowTiles> sums(tile.count);
  walk.each([&](int stage) {
    const uint32_t at = ring + stage * S::kStageBytes, words_at = at + S::kCodeBytes;
    sums.add(at, words_at, words_at + S::kWordBytes + lane / 4 * S::kTokenPitch + lane % 4 * 16, row, lane);
  });
  store(w, tile, sums, warp, lane);
}

// x as float16, scaled: what is too large for that stays the largest. A thread has eight values. Permuted: of
// each 32, pair i of eight neighbours lies behind pairs i of the eights before it, as warpgroups take them.
template <bool kPermuted>
__global__ void halves_kernel(const uint4* x, uint32_t* halves, int64_t count) {
  let_next_start();
  wait_for_previous();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const auto convert = [](uint32_t pair) {
    return pack_f16(__uint_as_float(pair << 16) * kBesideCodes,
                    __uint_as_float(pair & 0xffff0000u) * kBesideCodes);
  };
  const uint4 eight = __ldcg(x + i);
  const uint4 made{convert(eight.x), convert(eight.y), convert(eight.z), convert(eight.w)};
  if constexpr (kPermuted) {
    uint32_t* to = halves + i / 4 * 16 + i % 4;
    to[0] = made.x, to[4] = made.y, to[8] = made.z, to[12] = made.w;
  } else {
    reinterpret_cast<uint4*>(halves)[i] = made;
  }
}

template <bool kPermuted>
void make_halves(const FineLinearParams& p, int64_t rows_of_x, Stream stream) {
  const int64_t count = rows_of_x * p.matrices.in_features / 8;
  launch(halves_kernel<kPermuted>,
         {.grid = static_cast<unsigned>(ceil_div(count, kThreads)),
          .block = kThreads,
          .overlaps_previous = true},
         stream, static_cast<const uint4*>(p.x), static_cast<uint32_t*>(p.halves), count);
}

struct Grid {
  int64_t tiles;  // of tokens
  int64_t pieces;
};

template <class Codec, int kTokenTiles, int kRowTiles>
void launch_tiles(const Work& w, const Grid& grid, Stream stream) {
  using S = Shape<Codec, kTokenTiles, kRowTiles>;
  launch(fine_linear_kernel<Codec, kTokenTiles, kRowTiles>,
         {.grid = {static_cast<unsigned>(ceil_div(w.p.matrices.out_features, S::kRows)),
                   static_cast<unsigned>(grid.tiles), static_cast<unsigned>(grid.pieces)},
          .block = kThreads,
          .shared_bytes = S::kSharedBytes,
          .overlaps_previous = true},
         stream, w);
}

// tokens: of a tile, at most
template <class Codec>
void launch_of(const Work& w, int64_t tokens, const Grid& grid, Stream stream) {
  if (tokens <= 8) return launch_tiles<Codec, 1, 1>(w, grid, stream);
  if (tokens <= 16) return launch_tiles<Codec, 2, 1>(w, grid, stream);
  // Codes of 4 bits need more registers than two CTAs of a multiprocessor have.
  if (tokens <= 32) return launch_tiles<Codec, 4, Codec::kBits == 4 ? 2 : 1>(w, grid, stream);
  launch_tiles<Codec, 8, 2>(w, grid, stream);
}

void multiply(const Work& w, int64_t tokens, const Grid& grid, Stream stream) {
  switch (w.p.matrices.codec) {
    case FineCodec::kOffset4:
      return launch_of<fine::Offset4>(w, tokens, grid, stream);
    case FineCodec::kFloat4:
      return launch_of<fine::Float4>(w, tokens, grid, stream);
    case FineCodec::kScaled8:
      return launch_of<fine::Scaled8>(w, tokens, grid, stream);
    case FineCodec::kOffset8:
      return launch_of<fine::Offset8>(w, tokens, grid, stream);
    case FineCodec::kFloat8:
      return launch_of<fine::Float8>(w, tokens, grid, stream);
  }
}

void check_params(const FineLinearParams& p) {
  const FineMatrices& m = p.matrices;
  check(m.out_features >= 1 && m.in_features >= 8 && m.in_features % 8 == 0 && m.num_matrices >= 1,
        "fine_linear: sizes");
  check(static_cast<int>(m.codec) >= 0 && static_cast<int>(m.codec) < kNumFineCodecs, "fine_linear: codec");
  for (const void* pointer :
       {p.x, static_cast<const void*>(p.halves), m.codes, static_cast<const void*>(m.words)})
    check(is_aligned(pointer, 16), "fine_linear: rows must be aligned");
}

void check_choice(const FineLinearParams& p, const ExpertChoice& choice) {
  check_params(p);
  check(p.matrices.num_matrices == choice.sizes.num_experts && p.num_rows == choice.sizes.num_pairs(),
        "fine_expert_linear: sizes of the choice");
}

}  // namespace

int64_t fine_splits(int64_t out_features, int64_t in_features) {
  const int64_t blocks = ceil_div(out_features, 256), most = in_features / 512;
  return std::clamp<int64_t>(multiprocessors() / blocks, 1, std::max<int64_t>(most, 1));
}

void fine_linear(const FineLinearParams& p, Stream stream) {
  check_params(p);
  check(p.matrices.num_matrices == 1 && p.num_rows >= 0, "fine_linear: one matrix");
  if (p.num_rows == 0) return;
  make_halves<false>(p, p.num_rows, stream);
  const int64_t pieces = fine_splits(p.matrices.out_features, p.matrices.in_features);
  const Work work{.p = p, .plan = {}, .has_plan = false, .pairs_of_row = 1, .subs = 1};
  multiply(work, p.num_rows, {ceil_div(p.num_rows, kMostFineTokens), pieces}, stream);
  if (pieces > 1)
    sum_parts({.parts = p.parts,
               .pieces = pieces,
               .bias = p.bias,
               .out = p.out,
               .num_rows = p.num_rows,
               .outputs = p.matrices.out_features},
              stream);
}

void fine_expert_linear(const FineLinearParams& p, const ExpertChoice& choice, bool shared, Stream stream) {
  check_choice(p, choice);
  const ExpertSizes& sizes = choice.sizes;
  if (p.num_rows == 0) return;
  const int64_t rows_of_x = shared ? sizes.num_tokens : sizes.num_pairs();
  if (has_fine_expert_tiles(p.matrices, sizes)) {
    make_halves<true>(p, rows_of_x, stream);
    return fine_expert_tiles({p, choice, shared, false, Activation::kSilu}, stream);
  }
  make_halves<false>(p, rows_of_x, stream);
  const int tile_rows = sizes.tile_rows(), tokens = std::min(tile_rows, kMostFineTokens);
  const Work work{.p = p,
                  .plan = expert_plan_at(choice.plan, sizes),
                  .has_plan = true,
                  .pairs_of_row = shared ? static_cast<int>(sizes.num_chosen) : 1,
                  .subs = tile_rows / tokens};
  multiply(work, tokens, {sizes.most_tiles() * work.subs, 1}, stream);
}

void fine_expert_gated(const FineLinearParams& p, const ExpertChoice& choice, Activation activation,
                       Stream stream) {
  check_choice(p, choice);
  check(has_fine_expert_tiles(p.matrices, choice.sizes), "fine_expert_gated: no tiles of these sizes");
  make_halves<true>(p, choice.sizes.num_tokens, stream);
  fine_expert_tiles({p, choice, true, true, activation}, stream);
}

}  // namespace bequest::cuda
