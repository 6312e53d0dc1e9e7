// Weights of skinny_chain.cu in the L2, ahead of the ring, of one row in codes of 4 bits.
//
// Such a row is multiplied in half of the time in which memory brings its weights. But memory would idle
// whenever the ring is full, where rows of x are waited for, and whenever the ring takes what the L2 has
// already. So a warp of its own asks the L2 for what the ring takes next, at memory's pace: more at once
// would hold up rows of x.
#pragma once

#include "device/barriers.cuh"
#include "device/copies.cuh"
#include "model/cuda/skinny_chain.cuh"

namespace bequest::cuda::chain {

// Of one CTA, by one thread.
class Window {
 public:
  __device__ Window(const GroupedArguments& a, const Fixed& fixed)
      : a_(a), ring_(fixed.ring), views_(fixed.views) {
    enter(0);
  }

  // Opens when the ring has asked for its first stages, behind what the chain before has asked for.
  __device__ void follow_ring() {
    const WindowSizes& sizes = a_.window;
#pragma unroll 1
    for (int i = 0; i < a_.stages + sizes.behind && !is_at_end(); ++i) advance();
#pragma unroll 1
    while (ring_.num_asked() < min(sizes.opens, stage_)) doze();
    due_ = now() + sizes.pace;
#pragma unroll 1
    while (!is_at_end()) {
      const int ahead = stage_ - ring_.num_asked();
      if (ahead <= 0) {
        advance();
      } else if (ahead > sizes.most || !is_due()) {
        doze();
      } else {
        ask();
        advance();
        due_ = now() + sizes.pace;
      }
    }
  }

  // Gate and up of the next chain, from behind what its ring takes before attention has ended: as long as
  // this CTA multiplies, and a few at its end, which come before attention asks for anything.
  __device__ void ask_next() {
    const WindowSizes& sizes = a_.window;
    const View &output = views_[0], &gate = views_[1];
    const int first = max(a_.stages - stages_of(output), 0) / gate.chunks;
    const int end = min(first + sizes.behind / gate.chunks, gate.end);
    int at_once = sizes.at_end / gate.chunks;
    due_ = now() + sizes.next_pace;
#pragma unroll 1
    for (int tile = first; tile < end; ++tile) {
#pragma unroll 1
      while (!is_due() && !has_multiplied()) doze();
      if (has_multiplied() && --at_once < 0) return;
      due_ += sizes.next_pace * gate.chunks;
      ask_next_tile(gate, tile);
    }
  }

 private:
  __device__ static uint32_t now() { return static_cast<uint32_t>(clock()); }
  __device__ static void doze() { __nanosleep(32); }  // those who multiply need its place
  __device__ bool is_due() const { return static_cast<int32_t>(now() - due_) >= 0; }
  __device__ bool is_at_end() const { return phase_ == a_.num_phases; }
  // All stages of this chain.
  __device__ bool has_multiplied() const {
    const int last = stage_ - 1;
    return ring_.num_asked() >= stage_ && ring_.empty[last % a_.stages].has_ended(last / a_.stages & 1);
  }

  __device__ void ask() const {
    const View& view = views_[phase_];
    const int row = tile_at<Form::kInt4>(view, tile_) * (view.kind == Kind::kGate ? kTile / 2 : kTile);
    prefetch_box(a_.weights[phase_], {0, row, 0, chunk_ * kStageLines});
    prefetch_box(a_.groups[phase_], {0, row, 0, chunk_});
  }
  __device__ void ask_next_tile(const View& gate, int tile) const {
    const uint32_t row_bytes = gate.units * (kUnit / 2), group_bytes = gate.chunks * (kStageGroups * 4);
    const int row = tile_at<Form::kInt4>(gate, tile) * (kTile / 2), rows = min(kTile / 2, gate.outputs - row);
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int64_t at = row + half * gate.outputs;
      prefetch_bytes(a_.ahead.codes + at * row_bytes, rows * row_bytes);
      prefetch_bytes(a_.ahead.groups + at * group_bytes, rows * group_bytes);
    }
  }

  // In the order of Reader::read.
  __device__ void advance() {
    ++stage_;
    const View& view = views_[phase_];
    if (++tile_ < min(round_ + kRoundTiles, view.end)) return;
    tile_ = round_;
    if (++chunk_ < view.chunks) return;
    chunk_ = 0;
    tile_ = round_ += kRoundTiles;
    if (round_ >= view.end) enter(phase_ + 1);
  }
  // The next product that this CTA has tiles of.
  __device__ void enter(int phase) {
#pragma unroll 1
    while (phase < a_.num_phases && views_[phase].first == views_[phase].end) ++phase;
    phase_ = phase;
    if (phase < a_.num_phases) tile_ = round_ = views_[phase].first;
  }

  const GroupedArguments& a_;
  const Ring& ring_;
  const View* const views_;
  int stage_ = 0, phase_ = 0, round_ = 0, chunk_ = 0, tile_ = 0;
  uint32_t due_ = 0;  // clocks
};

}  // namespace bequest::cuda::chain
