// Tiles of rows of one expert by blocks of its matrix in codes, through products of warpgroups.
//
// As in expert_tiles.cu rows of W are the rows of a product, and tokens its columns. The copy engine brings
// codes and their words, threads bring rows of x. Codes become float16 in registers, with their scales, and
// are multiplied from there: a warpgroup makes the next 32 of k while the tensor cores have the last. How
// many columns a product has depends on how many rows the expert has; a column depends on no other.
//
// A lane of a quad has eight neighbours of each 32 of k, where tensor cores expect pairs of four places. So x
// lies in their order (permuted, see fine_linear.cu).
#include <algorithm>

#include "device/copies.cuh"
#include "device/current_device.cuh"
#include "device/launch.cuh"
#include "device/shared_memory.cuh"
#include "device/vectors.cuh"
#include "ops/cuda/activation.cuh"
#include "ops/cuda/fine_experts.cuh"
#include "ops/cuda/fine_experts.h"

namespace bequest::cuda {
namespace {

constexpr size_t kMostSharedBytes = 227 * 1024;

// By one warp.
template <class S, bool kGated>
__device__ __forceinline__ void load_weights(const TileArgs& a, const FineMaps& maps,
                                             FineBuffers<S>& buffers) {
  constexpr int kBlockEights = S::kRows / kEight / (kGated ? 2 : 1);
  const int eights = static_cast<int>(a.outputs) / kEight;  // of gate, or of all
  const uint64_t policy = read_once_policy();
  Cursor<S::kStages> at;
  uint32_t box = 0;
  for (ItemWalk<S> walk(a); !walk.done();) {
    const TileItem item = walk.take();
    const int row = item.expert * eights * (kGated ? 2 : 1) + item.block * kBlockEights;
    for (int unit = 0; unit * S::kDepth < a.in_features; ++unit) {
      const bool has_words = unit % S::kSharing == 0;
      PhaseBarrier& full = buffers.full[at.index];
      buffers.empty[at.index].wait(at.parity ^ 1);
      if (is_elected()) {
        full.arrive_expecting(S::kCodeBytes + (has_words ? S::kWordBytes : 0));
        copy_box(maps.codes, shared_address(buffers.codes[at.index]), full,
                 {unit * kPanelRowBytes, 0, 0, row}, policy);
        if (has_words)
          copy_box(maps.words, shared_address(buffers.words[box % S::kBoxes]), full,
                   {unit * S::kUnitWords, 0, 0, row}, policy);
      }
      __syncwarp();
      box += has_words;
      at.advance();
    }
  }
}

// A thread of a multiplying warpgroup: its part of the sums of an item.
template <class S, bool kGated>
class Multiplier {
 public:
  __device__ Multiplier(const TileArgs& a, const float* scales, FineBuffers<S>& buffers)
      : a_(a),
        scales_(scales),
        buffers_(buffers),
        row_(static_cast<int>(threadIdx.x) / kWarp * 16 + spread(static_cast<int>(threadIdx.x) % kWarp / 4)),
        lane_(static_cast<int>(threadIdx.x) % kWarp) {}

  __device__ __forceinline__ void run() {
    for (ItemWalk<S> walk(a_); !walk.done();) {
      const TileItem item = walk.take();
      Sums sums = {};  // of all columns: those of each branch alone would all be kept alive
      if (item.count <= 16)
        multiply_all(first<16>(sums));
      else if (S::kTokens == 32 || item.count <= 32)
        multiply_all(first<32>(sums));
      else if (item.count <= 48)
        multiply_all(first<S::kTokens - 16>(sums));
      else
        multiply_all(sums);
      const RowStore<S, kOutputs> stored(a_, item, 0);
      sync();  // the results before these have been stored
      if constexpr (!kGated)
        leave(item, sums, nullptr);
      else if (a_.activation == Activation::kClampedSwish)
        leave(item, sums, gated<Activation::kClampedSwish>);
      else if (a_.activation == Activation::kSilu)
        leave(item, sums, gated<Activation::kSilu>);
      else
        leave(item, sums, [this](float x, float up) { return rarely_gate(a_.activation, x, up); });
      sync();
      stored.run(a_, item, buffers_.results);
    }
  }

 private:
  static constexpr int kOutputs = kGated ? S::kRows / 2 : S::kRows;
  using Codec = typename S::Codec;
  using Operands = uint32_t[2][4];  // of 32 of k: two products
  using Sums = float[S::kTokens / 2];

  // Which of eight rows of W is a row of a product: eight lanes, which are served at once, read rows that lie
  // in different banks.
  __device__ static __forceinline__ int spread(int row) { return row / 2 + row % 2 * 4; }

  template <int kColumns>
  __device__ static __forceinline__ auto& first(Sums& sums) {
    return reinterpret_cast<float (&)[kColumns / 2]>(sums);
  }

  template <int kCount>
  __device__ __forceinline__ void multiply_all(float (&sums)[kCount]) {
    Operands a[2] = {};
    int before = -1;  // the stage whose products may be under way
#pragma unroll 1
    for (int unit = 0; unit * S::kDepth < a_.in_features; ++unit) {
      buffers_.full[at_.index].wait(at_.parity);
      fence_async_proxy();  // rows of x were not written by the copy engine
      if (unit % S::kSharing == 0) ++box_;
      const uint64_t x = operand(shared_address(buffers_.tokens[at_.index]), kSwizzleBytes);
#pragma unroll
      for (int read = 0; read < S::kReads; ++read) {
        uint32_t codes[2][4], words[2][Codec::kWords];
#pragma unroll
        for (int half = 0; half < 2; ++half) load(codes[half], words[half], row_ + half * 8, unit, read);
#pragma unroll
        for (int group = 0; group < Codec::kGroups; ++group) {
          const int i = read * Codec::kGroups + group;
          wait_operands<1>();  // all products but the last two
          hold(a[i % 2]);
          if (i == 1 && before >= 0) release(before);
          widen(codes, words, group, a[i % 2]);
          begin_products();
#pragma unroll
          for (int step = 0; step < 2; ++step)
            multiply_rows<F16Operands>(
                sums, a[i % 2][step], advance(x, i / 2 * S::kTokenPanelBytes + i % 2 * 64 + step * 32), true);
          commit_products();
        }
      }
      before = at_.index;
      at_.advance();
    }
    wait_products<0>(sums);
    hold(a[0]), hold(a[1]);
    release(before);
  }

  __device__ __forceinline__ void load(uint32_t (&codes)[4], uint32_t (&words)[Codec::kWords], int row,
                                       int unit, int read) const {
    load_16(codes, shared_address(buffers_.codes[at_.index]) + panel_offset(row, read * 4 + lane_ % 4));
    const int at = row * S::kRowWords + unit % S::kSharing * S::kUnitWords + read * Codec::kWords;
    const uint32_t from = shared_address(buffers_.words[box_ % S::kBoxes]) + at * 4;
    if constexpr (Codec::kWords == 4)
      load_16(words, from);
    else if constexpr (Codec::kWords == 2)
      load_8(words, from);
    else
      words[0] = load_4(from);
  }

  __device__ __forceinline__ void widen(const uint32_t (&codes)[2][4],
                                        const uint32_t (&words)[2][Codec::kWords], int group,
                                        Operands& to) const {
    uint32_t low[4], high[4];
    const uint32_t half = lane_ % 4 < 2 ? kFirstTwice : kSecondTwice;
    Codec::widen(codes[0], words[0], group, half, low);
    Codec::widen(codes[1], words[1], group, half, high);
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i / 2][i % 2 * 2] = low[i], to[i / 2][i % 2 * 2 + 1] = high[i];
  }

  // Products read registers while they run: these must stay what they are until here.
  __device__ static __forceinline__ void hold(const Operands& a) {
#pragma unroll
    for (const auto& step : a)
#pragma unroll
      for (uint32_t pair : step) asm volatile("" ::"r"(pair) : "memory");
  }

  __device__ __forceinline__ void release(int stage) {
    if (lane_ == 0) buffers_.empty[stage].arrive();
  }

  template <Activation kActivation>
  __device__ static __forceinline__ float gated(float x, float up) {
    return activate<kActivation>(x) * factor<kActivation>(up);
  }

  // Sums [n * 4 + half * 2 + e] are of token n * 8 + lane % 4 * 2 + e. Of a gate half 1 is up.
  template <class F>
  __device__ __forceinline__ void leave(const TileItem& item, const Sums& sums, F&& finish) {
    const int place = kGated ? row_ / 16 * 8 + row_ % 8 : row_;  // row_ % 16 < 8
    float scale[2], bias[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int output = item.block * kOutputs + place + (kGated ? 0 : half * 8);
      const bool exists = output < a_.outputs;
      const int64_t of_all =
          (int64_t{item.expert} * (kGated ? 2 : 1) + (kGated ? half : 0)) * a_.outputs + output;
      scale[half] = exists ? __ldg(scales_ + of_all) / kBesideCodes : 0;
      bias[half] = exists && a_.bias != nullptr ? __ldg(a_.bias + of_all) : 0;
    }
#pragma unroll
    for (int eight = 0; eight < S::kTokens / 8; ++eight) {
      if (eight * 8 >= item.count) break;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        BFloat16* to = &buffers_.results[eight * 8 + lane_ % 4 * 2 + i][place];
        const float low = sums[eight * 4 + i] * scale[0] + bias[0];
        const float high = sums[eight * 4 + 2 + i] * scale[1] + bias[1];
        if constexpr (kGated) {
          to[0] = narrow<BFloat16>(finish(rounded<BFloat16>(low), rounded<BFloat16>(high)));
        } else {
          to[0] = narrow<BFloat16>(low), to[8] = narrow<BFloat16>(high);
        }
      }
    }
  }

  __device__ __forceinline__ static void sync() { sync_threads<1, S::kMultipliers>(); }

  const TileArgs& a_;
  const float* const scales_;
  FineBuffers<S>& buffers_;
  const int row_, lane_;
  Cursor<S::kStages> at_;
  uint32_t box_ = ~0u;  // of words: the loader's number
};

// waits: the plan may be of the kernels right ahead. Else it is older, and weights are asked for while these
// still run.
template <class S, bool kGated>
__global__ __launch_bounds__(S::kThreads, 1) void fine_expert_kernel(const __grid_constant__ TileArgs a,
                                                                     const __grid_constant__ FineMaps maps,
                                                                     const float* scales, const bool waits) {
  if constexpr (kIsHopper) {
    extern __shared__ __align__(1024) uint8_t shared[];
    auto& buffers = *reinterpret_cast<FineBuffers<S>*>(shared);
    if (threadIdx.x == 0) {
      prefetch_map(maps.codes);
      prefetch_map(maps.words);
      buffers.init();
    }
    if (waits) wait_for_previous();
    let_next_start();  // not before: whoever comes in then finds all that is older complete
    __syncthreads();
    const int thread = static_cast<int>(threadIdx.x) - S::kMultipliers;
    if (__shfl_sync(kAllLanes, thread, 0) < 0) {
      wait_for_previous();
      Multiplier<S, kGated>(a, scales, buffers).run();
    } else {
      if (thread < kWarp) return load_weights<S, kGated>(a, maps, buffers);
      wait_for_previous();
      RowLoader<S, FineBuffers<S>>(a, buffers, thread - kWarp).run();
    }
  }
}

template <class S, bool kGated>
void launch_tiles(const FineTilesParams& t, Stream stream) {
  const FineLinearParams& p = t.p;
  const ExpertSizes& sizes = t.choice.sizes;
  const FineMatrices& m = p.matrices;
  const int64_t outputs = kGated ? m.out_features / 2 : m.out_features;
  const TileArgs a{.x = p.halves,
                   .bias = static_cast<const float*>(p.bias),
                   .out = p.out,
                   .plan = expert_plan_at(t.choice.plan, sizes),
                   .in_features = m.in_features,
                   .outputs = outputs,
                   .most_tiles = static_cast<int>(sizes.most_tiles()),
                   .cuts = std::max(1, sizes.tile_rows() / S::kTokens),
                   .blocks = static_cast<int>(ceil_div(outputs, kGated ? S::kRows / 2 : S::kRows)),
                   .pairs_of_row = static_cast<int>(t.shares_rows ? sizes.num_chosen : 1),
                   .activation = t.activation};
  static_assert(sizeof(FineBuffers<S>) <= kMostSharedBytes);
  const int64_t most_items = int64_t{a.most_tiles} * a.blocks * a.cuts;
  launch(fine_expert_kernel<S, kGated>,
         {.grid = static_cast<unsigned>(std::min<int64_t>(most_items, multiprocessors())),
          .block = S::kThreads,
          .shared_bytes = sizeof(FineBuffers<S>),
          .overlaps_previous = true},
         stream, a, fine_maps<S>(m, kGated), m.scales, t.shares_rows);
}

template <class S>
void launch_gated(const FineTilesParams& t, Stream stream) {
  t.gated ? launch_tiles<S, true>(t, stream) : launch_tiles<S, false>(t, stream);
}

template <class Codec>
void launch_of(const FineTilesParams& t, Stream stream) {
  if (t.choice.sizes.tile_rows() <= 32) return launch_gated<FineTileShape<Codec, 32>>(t, stream);
  launch_gated<FineTileShape<Codec, 64>>(t, stream);
}

}  // namespace

bool has_fine_expert_tiles(const FineMatrices& m, const ExpertSizes& sizes) {
  // Words of a row are a multiple of 16 bytes.
  const bool has_words = m.codec != FineCodec::kFloat4 || ceil_div(m.in_features, kFineUnit) % 2 == 0;
  return sizes.tile_rows() >= 32 && has_words && m.in_features % 32 == 0 && m.out_features % 16 == 0 &&
         m.num_matrices * m.out_features <= INT32_MAX && is_hopper();
}

void fine_expert_tiles(const FineTilesParams& t, Stream stream) {
  check(is_aligned(t.p.out, 16) && is_aligned(t.choice.plan, 16),
        "fine_expert_tiles: places are aligned to 16");
  switch (t.p.matrices.codec) {
    case FineCodec::kOffset4:
      return launch_of<fine::Offset4>(t, stream);
    case FineCodec::kFloat4:
      return launch_of<fine::Float4>(t, stream);
    case FineCodec::kScaled8:
      return launch_of<fine::Scaled8>(t, stream);
    case FineCodec::kOffset8:
      return launch_of<fine::Offset8>(t, stream);
    case FineCodec::kFloat8:
      return launch_of<fine::Float8>(t, stream);
  }
}

}  // namespace bequest::cuda
