// The sizes of expert_tiles.cu, its arguments, its shared memory, and the items that its CTAs walk through.
#pragma once

#include <cuda_runtime.h>

#include "core/dtype.h"
#include "device/barriers.cuh"
#include "device/reductions.cuh"
#include "device/warpgroup.cuh"
#include "ops/activation.h"
#include "ops/cuda/expert_plan.h"

namespace bequest::cuda {

struct TileArgs {
  const void* x;  // rows of in_features bfloat16
  const float* bias;
  void* out;  // [T * K, outputs] bfloat16
  ExpertPlan plan;
  int64_t in_features;
  int64_t outputs;  // of a pair: out_features, or half of them
  int most_tiles;
  int cuts;          // of a tile of the plan, where it has more tokens than a product
  int blocks;        // of outputs, per tile
  int pairs_of_row;  // pairs that share a row of x: 1, or those of a token
  Activation activation;
};

// `Tokens` rows of x by 64 rows of W for each of `Groups` warpgroups that multiply.
template <int Tokens, int Groups>
struct TileShape {
  static constexpr int kTokens = Tokens, kGroups = Groups;
  static constexpr bool kIsCut = false;                            // of tiles of the plan
  static constexpr int kRows = Groups * 64;                        // of W
  static constexpr int kPartTokens = Tokens < 128 ? Tokens : 128;  // columns of one product
  static constexpr int kParts = Tokens / kPartTokens;
  static constexpr int kPanels = Tokens == 256 ? 1 : 2;  // of a stage
  static constexpr int kDepth = kPanels * kPanelColumns;
  static constexpr int kWeightPanelBytes = kRows * kPanelRowBytes;
  static constexpr int kTokenPanelBytes = Tokens * kPanelRowBytes;
  static constexpr int kStages = Tokens == 8 ? 5 : Tokens == 128 ? 3 : 4;
  static constexpr int kMultipliers = Groups * 128;  // threads
  static constexpr int kRowWarps = Tokens <= 16 ? 1 : Tokens == 32 ? 2 : 3;
  static constexpr int kThreads = kMultipliers + kWarp + kRowWarps * kWarp;
  // Of a thread, where those that multiply take some from those that copy.
  static constexpr bool kSharesRegisters = Tokens == 256;
  static constexpr int kMultiplierRegisters = 184, kLoaderRegisters = 136;
  static constexpr int kResultPitch = kRows + 8;  // tokens that are stored at once lie in different banks
  // Per multiprocessor, and no more have room: else those that come in beside the last of the kernel ahead
  // would lie unevenly.
  static constexpr int kBlocks = Groups == 1 ? 2 : 1;
};

template <class S>
struct TileBuffers {
  alignas(1024) uint8_t weights[S::kStages][S::kPanels * S::kWeightPanelBytes];
  alignas(1024) uint8_t tokens[S::kStages][S::kPanels * S::kTokenPanelBytes];
  alignas(16) BFloat16 results[S::kPartTokens][S::kResultPitch];
  PhaseBarrier full[S::kStages];   // weights and rows are there
  PhaseBarrier empty[S::kStages];  // they have been multiplied

  __device__ void init() {
    for (int i = 0; i < S::kStages; ++i) {
      full[i].init(1 + S::kRowWarps * kWarp);
      empty[i].init(S::kMultipliers / kWarp);
    }
    publish_barriers();
  }
};

// A tile of pairs by a block of outputs.
struct TileItem {
  int expert;
  int first, count;  // of its pairs, in the plan's order
  int block;
};

// The items of a CTA. Those of one expert and one block of outputs follow each other, so that weights which
// several tiles need are read by neighbours at about the same time. Where tiles are cut, all first cuts come
// before all second ones, many of which are empty.
template <class S>
class ItemWalk {
 public:
  __device__ explicit ItemWalk(const TileArgs& a) : a_(a), index_(static_cast<int>(blockIdx.x)) {
    ask();
    num_uncut_ = __ldcg(a.plan.num_tiles) * a.blocks;
    if (S::kIsCut && index_ >= num_uncut_ && !done()) ask();  // of a later cut
    find();
  }

  __device__ bool done() const { return index_ >= (S::kIsCut ? num_uncut_ * a_.cuts : num_uncut_); }

  __device__ TileItem take() {
    const TileItem item = at(index_);
    index_ += static_cast<int>(gridDim.x);
    ask();
    find();
    return item;
  }

 private:
  // Ahead of its use, and before it is known whether there is such an item.
  __device__ void ask() {
    const int of_cut = S::kIsCut && index_ >= num_uncut_ ? index_ % num_uncut_ : index_;
    const int tile = min(of_cut / a_.blocks, a_.most_tiles - 1);
    run_ = __ldcg(reinterpret_cast<const int4*>(a_.plan.runs) + tile);
  }
  // Passes by what is empty.
  __device__ void find() {
    if constexpr (S::kIsCut)
      while (!done() && at(index_).count <= 0) {
        index_ += static_cast<int>(gridDim.x);
        ask();
      }
  }

  __device__ __forceinline__ TileItem at(int index) const {
    const int tile_rows = S::kIsCut ? S::kTokens * a_.cuts : S::kTokens;
    const int cut = S::kIsCut ? index / num_uncut_ : 0;
    const int tiles = (run_.z + tile_rows - 1) / tile_rows;
    const int place = index - cut * num_uncut_ - run_.w * a_.blocks;
    const int begin = place % tiles * tile_rows + cut * S::kTokens;
    return {run_.x, run_.y + begin, min(S::kTokens, run_.z - begin), place / tiles};
  }

  const TileArgs& a_;
  int index_;
  int num_uncut_ = INT32_MAX;  // items of first cuts
  int4 run_;                   // an ExpertRun
};

}  // namespace bequest::cuda
