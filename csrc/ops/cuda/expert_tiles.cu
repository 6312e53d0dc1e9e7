// Tiles of rows of one expert by blocks of its matrix, through tensor cores: bfloat16 on Hopper.
//
// Weights are most of the work where experts get few rows, as in all steps of a large model but the longest.
// So the 64 rows of a warpgroup's product are rows of W, and its columns are tokens, 8 to 256 of them: few
// tokens waste nothing. The copy engine brings weights by a map of all experts; rows of x lie anywhere and
// are copied by threads. A tile's columns without a token are never written and never stored: what becomes of
// a column depends on no other.
//
// Of gate and up a tile has 8 rows of one and the same 8 of the other in turn. So one thread has both sums of
// an output, and multiplies them where they are.
//
// Results turn in shared memory, because a thread has neighbours along W and a row of the result is a
// token's.
#include "device/copies.cuh"
#include "device/current_device.cuh"
#include "device/launch.cuh"
#include "device/shared_memory.cuh"
#include "device/tensor_map.cuh"
#include "device/vectors.cuh"
#include "ops/cuda/activation.cuh"
#include "ops/cuda/expert_linear.cuh"
#include "ops/cuda/expert_rows.cuh"
#include "ops/cuda/expert_tiles.cuh"

namespace bequest::cuda {
namespace {

// --- what is copied -------------------------------------------------------------------------------------

// W of all experts as blocks of tiles: {k, 8 rows, gate and up, eights of rows}. An expert's last block may
// reach into the next expert, whose products nobody stores, and behind the last one there are zeros.
CUtensorMap expert_map(const ExpertMatrices& w, int64_t num_experts, bool gated, int tile_rows) {
  const auto k = static_cast<cuuint64_t>(w.in_features), halves = cuuint64_t{gated ? 2u : 1u};
  const cuuint64_t half_rows = static_cast<cuuint64_t>(w.out_features) / halves;
  const cuuint64_t rows = static_cast<cuuint64_t>(num_experts * w.out_features) - (halves - 1) * half_rows;
  const cuuint64_t sizes[] = {k, kEight, halves, rows / kEight};
  const cuuint64_t strides[] = {k * 2, half_rows * k * 2, kEight * k * 2};
  const cuuint32_t box[] = {kPanelColumns, kEight, static_cast<cuuint32_t>(halves),
                            static_cast<cuuint32_t>(static_cast<cuuint64_t>(tile_rows) / kEight / halves)};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      tensor_map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(w.weight), sizes,
                           strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           kLineFetch, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS, "the driver refused the tensor map of the experts");
  return map;
}

// By one warp.
template <class S, bool kGated>
__device__ __forceinline__ void load_weights(const TileArgs& a, const CUtensorMap& map,
                                             TileBuffers<S>& buffers) {
  const uint64_t policy = read_once_policy();
  const int eights = static_cast<int>(a.outputs) / kEight;  // of gate, or of all
  constexpr int kBlockEights = S::kRows / kEight / (kGated ? 2 : 1);
  Cursor<S::kStages> at;
  for (ItemWalk<S> walk(a); !walk.done();) {
    const TileItem item = walk.take();
    const int row = item.expert * eights * (kGated ? 2 : 1) + item.block * kBlockEights;
    for (int k = 0; k < a.in_features; k += S::kDepth) {
      PhaseBarrier& full = buffers.full[at.index];
      buffers.empty[at.index].wait(at.parity ^ 1);
      if (is_elected()) {
        full.arrive_expecting(S::kPanels * S::kWeightPanelBytes);
#pragma unroll
        for (int panel = 0; panel < S::kPanels; ++panel)
          copy_box(map, shared_address(buffers.weights[at.index]) + panel * S::kWeightPanelBytes, full,
                   {k + panel * kPanelColumns, 0, 0, row}, policy);
      }
      __syncwarp();
      at.advance();
    }
  }
}

// By the warps that do not multiply: the first brings weights, the others bring rows.
template <class S, bool kGated>
__device__ __forceinline__ void load(const TileArgs& a, const CUtensorMap& map, TileBuffers<S>& buffers,
                                     int thread) {
  if (thread < kWarp) return load_weights<S, kGated>(a, map, buffers);
  wait_for_previous();
  RowLoader<S, TileBuffers<S>>(a, buffers, thread - kWarp).run();
}

// --- what is multiplied ---------------------------------------------------------------------------------

// A thread of a multiplying warpgroup: its part of the sums of an item.
template <class S, bool kGated>
class Multiplier {
 public:
  __device__ Multiplier(const TileArgs& a, TileBuffers<S>& buffers)
      : a_(a),
        buffers_(buffers),
        group_(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 128, 0)),
        warp_(static_cast<int>(threadIdx.x) / kWarp % 4),
        lane_(static_cast<int>(threadIdx.x) % kWarp) {}

  __device__ __forceinline__ void run() {
    for (ItemWalk<S> walk(a_); !walk.done();) {
      const TileItem item = walk.take();
      if constexpr (S::kParts == 1)
        finish<1>(item);
      else
        item.count <= S::kPartTokens ? finish<1>(item) : finish<S::kParts>(item);
    }
  }

 private:
  static constexpr int kOutputs = kGated ? S::kRows / 2 : S::kRows;
  using Sums = float[S::kPartTokens / 2];
  using Store = RowStore<S, kOutputs>;
  static_assert(S::kParts == 1 || S::kPartTokens * Store::kChunks % S::kMultipliers == 0);

  // kParts of the tile's columns have tokens.
  template <int kParts>
  __device__ __forceinline__ void finish(const TileItem& item) {
    Sums sums[kParts] = {};  // else the compiler keeps those of the other branch alive
    multiply_all<kParts>(sums);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Store stored(a_, item, part * S::kPartTokens);
      sync();  // the results before these have been stored
      if constexpr (!kGated)
        leave(item, sums[part]);
      else if (a_.activation == Activation::kSilu)
        leave_gated(item, sums[part], [](float x, float up) { return activate<Activation::kSilu>(x) * up; });
      else
        leave_gated(item, sums[part],
                    [this](float x, float up) { return rarely_gate(a_.activation, x, up); });
      sync();
      stored.run(a_, item, buffers_.results);
    }
  }

  template <int kParts>
  __device__ __forceinline__ void multiply_all(Sums (&sums)[kParts]) {
    int before = -1;  // the stage whose products may be under way
    for (int k = 0; k < a_.in_features; k += S::kDepth) {
      buffers_.full[at_.index].wait(at_.parity);
      fence_async_proxy();  // rows of x were not written by the copy engine
      const uint64_t w = operand(shared_address(buffers_.weights[at_.index]) + group_ * (64 * kPanelRowBytes),
                                 kSwizzleBytes);
      const uint64_t x = operand(shared_address(buffers_.tokens[at_.index]), kSwizzleBytes);
      begin_products();
#pragma unroll
      for (int i = 0; i < S::kDepth / 16; ++i)
#pragma unroll
        for (int part = 0; part < kParts; ++part)
          multiply(
              sums[part], advance(w, i / 4 * S::kWeightPanelBytes + i % 4 * 32),
              advance(x, i / 4 * S::kTokenPanelBytes + part * S::kPartTokens * kPanelRowBytes + i % 4 * 32),
              true);
      commit_products();
      wait_operands<1>();
      if (before >= 0) release(before);
      before = at_.index;
      at_.advance();
    }
    wait_operands<0>();
#pragma unroll
    for (int part = 0; part < kParts; ++part) pin(sums[part]);
    release(before);
  }
  __device__ __forceinline__ void release(int stage) {
    if (lane_ == 0) buffers_.empty[stage].arrive();
  }

  // Sums [n * 4 + half * 2 + e] are of token n * 8 + lane % 4 * 2 + e.
  __device__ __forceinline__ void leave(const TileItem& item, const Sums& sums) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int place = group_ * 64 + warp_ * 16 + half * 8 + lane_ / 4;
      const float bias = bias_of(item, item.block * kOutputs + place, 0);
#pragma unroll
      for (int i = 0; i < S::kPartTokens / 4; ++i)
        result(i, place) = narrow<BFloat16>(sums[i / 2 * 4 + half * 2 + i % 2] + bias);
    }
  }
  // Half 0 is the gate, half 1 is up.
  template <class F>
  __device__ __forceinline__ void leave_gated(const TileItem& item, const Sums& sums, F&& gated) {
    const int place = group_ * 32 + warp_ * 8 + lane_ / 4, output = item.block * kOutputs + place;
    const float gate_bias = bias_of(item, output, 0), up_bias = bias_of(item, output, 1);
#pragma unroll
    for (int i = 0; i < S::kPartTokens / 4; ++i) {
      const float gate = rounded<BFloat16>(sums[i / 2 * 4 + i % 2] + gate_bias);
      const float up = rounded<BFloat16>(sums[i / 2 * 4 + 2 + i % 2] + up_bias);
      result(i, place) = narrow<BFloat16>(gated(gate, up));
    }
  }
  __device__ __forceinline__ float bias_of(const TileItem& item, int output, int half) const {
    if (a_.bias == nullptr || output >= a_.outputs) return 0;
    return __ldg(a_.bias + (int64_t{item.expert} * (kGated ? 2 : 1) + half) * a_.outputs + output);
  }
  __device__ __forceinline__ BFloat16& result(int i, int place) {
    return buffers_.results[i / 2 * 8 + lane_ % 4 * 2 + i % 2][place];
  }

  __device__ __forceinline__ static void sync() { sync_threads<1, S::kMultipliers>(); }

  const TileArgs& a_;
  TileBuffers<S>& buffers_;
  const int group_, warp_, lane_;
  Cursor<S::kStages> at_;
};

// --- the kernel -----------------------------------------------------------------------------------------

// The plan of a gated product is of the kernel ahead. That of the other one is older, so weights are asked
// for while the gated product still runs.
template <class S, bool kGated>
__global__ __launch_bounds__(S::kThreads,
                             S::kBlocks) void expert_tile_kernel(const __grid_constant__ TileArgs a,
                                                                 const __grid_constant__ CUtensorMap map) {
  if constexpr (kIsHopper) {
    extern __shared__ __align__(1024) uint8_t shared[];
    auto& buffers = *reinterpret_cast<TileBuffers<S>*>(shared);
    if (threadIdx.x == 0) {
      prefetch_map(map);
      buffers.init();
    }
    if constexpr (kGated) wait_for_previous();
    let_next_start();  // not before: whoever comes in then finds all that is older complete
    __syncthreads();
    const int thread = static_cast<int>(threadIdx.x) - S::kMultipliers;
    if (__shfl_sync(kAllLanes, thread, 0) < 0) {
      if constexpr (S::kSharesRegisters) grow_registers<S::kMultiplierRegisters>();
      wait_for_previous();
      Multiplier<S, kGated>(a, buffers).run();
    } else {
      if constexpr (S::kSharesRegisters) shrink_registers<S::kLoaderRegisters>();
      load<S, kGated>(a, map, buffers, thread);
    }
  }
}

template <class S, bool kGated>
void launch_tiles(const TileArgs& a, const ExpertMatrices& w, const ExpertSizes& sizes, Stream stream) {
  TileArgs args = a;
  args.blocks = static_cast<int>(ceil_div(a.outputs, kGated ? S::kRows / 2 : S::kRows));
  const int64_t most_items = int64_t{args.most_tiles} * args.blocks;
  const LaunchShape shape{
      .grid = static_cast<unsigned>(std::min<int64_t>(most_items, multiprocessors() * S::kBlocks)),
      .block = S::kThreads,
      .shared_bytes = sizeof(TileBuffers<S>),
      .overlaps_previous = !w.is_fresh};
  launch(expert_tile_kernel<S, kGated>, shape, stream, args,
         expert_map(w, sizes.num_experts, kGated, S::kRows));
}

template <bool kGated>
void launch_sizes(const TileArgs& a, const ExpertMatrices& w, const ExpertSizes& sizes, Stream stream) {
  switch (sizes.tile_rows()) {
    case 8:
      return launch_tiles<TileShape<8, 1>, kGated>(a, w, sizes, stream);
    case 16:
      return launch_tiles<TileShape<16, 1>, kGated>(a, w, sizes, stream);
    case 32:
      return launch_tiles<TileShape<32, 2>, kGated>(a, w, sizes, stream);
    case 64:
      return launch_tiles<TileShape<64, 2>, kGated>(a, w, sizes, stream);
    case 128:
      return launch_tiles<TileShape<128, 2>, kGated>(a, w, sizes, stream);
    case 256:
      return launch_tiles<TileShape<256, 2>, kGated>(a, w, sizes, stream);
  }
  fail("expert products: no tile of this size");
}

}  // namespace

void multiply_tiles(const ExpertProduct& p, Stream stream) {
  check(is_aligned(p.x, 16) && is_aligned(p.matrices.weight, 16) && is_aligned(p.out, 16),
        "expert products: rows and weights are aligned to 16 bytes");
  check(is_aligned(p.choice.plan, 16), "expert products: the plan is aligned to 16 bytes");
  const TileArgs a{.x = p.x,
                   .bias = p.matrices.bias,
                   .out = p.out,
                   .plan = expert_plan_at(p.choice.plan, p.choice.sizes),
                   .in_features = p.matrices.in_features,
                   .outputs = p.outputs(),
                   .most_tiles = static_cast<int>(p.choice.sizes.most_tiles()),
                   .cuts = 1,
                   .blocks = 0,
                   .pairs_of_row = static_cast<int>(p.shares_rows ? p.choice.sizes.num_chosen : 1),
                   .activation = p.activation};
  p.gated ? launch_sizes<true>(a, p.matrices, p.choice.sizes, stream)
          : launch_sizes<false>(a, p.matrices, p.choice.sizes, stream);
}

}  // namespace bequest::cuda
