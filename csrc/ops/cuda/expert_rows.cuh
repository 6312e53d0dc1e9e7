// How products of experts read rows of x and store results, which lie anywhere: by the plan of a choice.
#pragma once

#include "device/copies.cuh"
#include "ops/cuda/expert_tiles.cuh"

namespace bequest::cuda {

inline constexpr int kEight = 8;  // elements of 16 bytes, and rows of W that follow each other in a tile

// A lane's rows of x: one 16-byte chunk of each along the depth of a stage. Where a row comes from and where
// it goes is known before the stages are walked through: a copy takes a few instructions there.
template <class S, class Buffers>
class RowLoader {
 public:
  __device__ RowLoader(const TileArgs& a, Buffers& buffers, int thread)
      : a_(a), buffers_(buffers), chunk_(thread % kChunks), first_(thread / kChunks) {
    const uint32_t panel = shared_address(buffers.tokens[0]) + chunk_ / 8 * S::kTokenPanelBytes;
#pragma unroll
    for (int i = 0; i < kPeriod; ++i) places_[i] = panel + panel_offset(first_ + i * kStep, chunk_ % 8);
  }

  __device__ __forceinline__ void run() {
    ItemWalk<S> walk(a_);
    if (walk.done()) return;
    TileItem next = walk.take();
    bool has_next = true;
    int32_t pairs[kMine];
    ask(next, pairs);
    while (has_next) {
      uint64_t sources[kMine];
      const int count = next.count;
#pragma unroll
      for (int i = 0; i < kMine; ++i)
        sources[i] = kept(reinterpret_cast<uint64_t>(
            static_cast<const BFloat16*>(a_.x) +
            static_cast<int64_t>(pairs[i] / a_.pairs_of_row) * a_.in_features + chunk_ * kEight));
      has_next = !walk.done();
      if (has_next) {
        next = walk.take();
        ask(next, pairs);  // while the rows of this one are copied
      }
      for (int k = 0; k < a_.in_features; k += S::kDepth) copy(sources, count, k);
    }
    commit_copies();
    wait_copies<0>();
  }

 private:
  static constexpr int kChunks = S::kDepth / kEight;
  static constexpr int kStep = S::kRowWarps * kWarp / kChunks;
  static constexpr int kMine = (S::kTokens + kStep - 1) / kStep;
  // The pattern of a panel repeats every 8 rows.
  static constexpr int kPeriod = kStep % 8 == 0 ? 1 : kStep % 4 == 0 ? 2 : kStep % 2 == 0 ? 4 : 8;

  // A value that is computed here, once, and not again wherever it is used.
  __device__ __forceinline__ static uint64_t kept(uint64_t value) {
    asm volatile("" : "+l"(value));
    return value;
  }

  // Of rows that do not exist: pair 0, which is not copied.
  __device__ __forceinline__ void ask(const TileItem& item, int32_t (&pairs)[kMine]) const {
#pragma unroll
    for (int i = 0; i < kMine; ++i)
      pairs[i] =
          first_ + i * kStep < item.count ? __ldcg(a_.plan.order + item.first + first_ + i * kStep) : 0;
  }

  __device__ __forceinline__ void copy(const uint64_t (&sources)[kMine], int count, int k) {
    buffers_.empty[at_.index].wait(at_.parity ^ 1);
    const uint64_t exists = kept(k + chunk_ * kEight < a_.in_features ? 1 : 0);
    const uint64_t bytes = kept(exists != 0 ? k * sizeof(BFloat16) : 0);
    uint32_t places[kPeriod];
#pragma unroll
    for (int i = 0; i < kPeriod; ++i)
      places[i] = static_cast<uint32_t>(kept(places_[i] + at_.index * (S::kPanels * S::kTokenPanelBytes)));
#pragma unroll
    for (int i = 0; i < kMine; ++i)
      if (first_ + i * kStep < count)
        copy_16_async(places[i % kPeriod] + i / kPeriod * (kPeriod * kStep * kPanelRowBytes),
                      reinterpret_cast<const void*>(sources[i] + bytes), exists != 0);
    buffers_.full[at_.index].arrive_behind_copies();
    at_.advance();
  }

  const TileArgs& a_;
  Buffers& buffers_;
  const int chunk_, first_;
  uint32_t places_[kPeriod];  // in the first stage, of the first rows
  Cursor<S::kStages> at_;
};

// Results of a part of an item on their way from shared memory, a row of kOutputs to each token. A thread
// stores kStored chunks, and asks for the pairs of their tokens before results are made.
template <class S, int kOutputs>
class RowStore {
 public:
  static constexpr int kChunks = kOutputs / kEight;
  static constexpr int kStored = (S::kPartTokens * kChunks + S::kMultipliers - 1) / S::kMultipliers;
  static_assert(S::kMultipliers % kChunks == 0);

  // first: of the part's tokens
  __device__ __forceinline__ RowStore(const TileArgs& a, const TileItem& item, int first) {
#pragma unroll
    for (int i = 0; i < kStored; ++i) {
      const int token = first + token_of(i);
      pairs_[i] = token < item.count ? __ldcg(a.plan.order + item.first + token) : -1;
    }
  }

  template <class Results>
  __device__ __forceinline__ void run(const TileArgs& a, const TileItem& item, const Results& results) const {
    const int place = static_cast<int>(threadIdx.x) % kChunks * kEight,
              output = item.block * kOutputs + place;
    if (output >= a.outputs) return;
#pragma unroll
    for (int i = 0; i < kStored; ++i)
      if (pairs_[i] >= 0)
        *reinterpret_cast<uint4*>(static_cast<BFloat16*>(a.out) + pairs_[i] * a.outputs + output) =
            *reinterpret_cast<const uint4*>(&results[token_of(i)][place]);
  }

 private:
  __device__ __forceinline__ static int token_of(int i) {
    return (static_cast<int>(threadIdx.x) + i * S::kMultipliers) / kChunks;
  }

  int32_t pairs_[kStored];
};

}  // namespace bequest::cuda
