// The walk of a block through its piece of k, unit by unit, in a ring of stages in shared memory. Copies of
// its own threads fill the stages; while one is multiplied, kStages - 1 are on their way.
#pragma once

#include "device/copies.cuh"

namespace bequest::cuda {

// `Loader`: load_weights(unit, stage) and load_rows(unit, stage) ask for a unit, by the whole block.
template <int kStages, class Loader>
class UnitWalk {
 public:
  // Of all `units` piece `piece` of `pieces`.
  __device__ __forceinline__ UnitWalk(const Loader& loader, int units, int piece, int pieces)
      : loader_(loader), first_(piece * units / pieces), count_((piece + 1) * units / pieces - first_) {}

  // Weights do not depend on the kernel before, so they are asked for first; rows of x behind its end.
  __device__ __forceinline__ void begin_weights() const {
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s)
      if (s < count_) loader_.load_weights(first_ + s, s);
  }
  __device__ __forceinline__ void begin_rows() const {
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) {
      if (s < count_) loader_.load_rows(first_ + s, s);
      commit_copies();
    }
  }

  // Calls take(stage) for each unit when its stage is there.
  template <class F>
  __device__ __forceinline__ void each(F&& take) const {
    int stage = 0;
#pragma unroll 1
    for (int unit = 0; unit < count_; ++unit) {
      wait_copies<kStages - 2>();
      __syncthreads();  // the stage is there, and all have read the one before it
      const int ahead = stage == 0 ? kStages - 1 : stage - 1;
      if (unit + kStages - 1 < count_) {
        loader_.load_weights(first_ + unit + kStages - 1, ahead);
        loader_.load_rows(first_ + unit + kStages - 1, ahead);
      }
      commit_copies();
      take(stage);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
  }

 private:
  const Loader& loader_;
  const int first_, count_;
};

}  // namespace bequest::cuda
