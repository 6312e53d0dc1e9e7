// Weights on their way into a phase of skinny_chain.cu: from memory into a ring, from the ring into
// registers.
#pragma once

#include "device/barriers.cuh"
#include "device/copies.cuh"
#include "device/shared_memory.cuh"
#include "model/cuda/skinny_chain.cuh"

namespace bequest::cuda::chain {

// Asks for all weights of a CTA in the order in which multiply() takes them. No more is asked for at once
// than keeps the memory busy: rows of x would wait behind it. By one thread. kOfExperts: the first ring has a
// pace of its own
template <Form kForm, bool kOfExperts = false>
class Reader {
 public:
  __device__ Reader(const Arguments& a, Ring& ring, uint32_t ring_at)
      : a_(a), ring_(ring), ring_at_(ring_at), policy_(read_once_policy()) {}

  // With what groups are scaled by.
  __device__ void read(const View& view, const CUtensorMap& map, const CUtensorMap& groups) {
    of_phase_ = 0;
    if constexpr (goes_by_stages(kForm)) {
#pragma unroll 1
      for (int round = view.first; round < view.end; round += kRoundTiles)
#pragma unroll 1
        for (int chunk = 0; chunk < view.chunks; ++chunk)
#pragma unroll 1
          for (int tile = round; tile < min(round + kRoundTiles, view.end); ++tile)
            read_grouped(view, map, groups, tile_at<kForm>(tile), chunk);
    } else {
#pragma unroll 1
      for (int tile = view.first; tile < view.end; ++tile)
#pragma unroll 1
        for (int chunk = 0; chunk < view.chunks; ++chunk) read_grouped(view, map, groups, tile, chunk);
    }
  }

  __device__ void read(const View& view, const CUtensorMap& map) {
    const int rows = view.kind == Kind::kGate ? kTile / 2 : kTile;
    of_phase_ = 0;
#pragma unroll 1
    for (int tile = view.first; tile < view.end; ++tile)
#pragma unroll 1
      for (int chunk = 0; chunk < view.chunks; ++chunk) {
        make_room();
        copy_stage(map, place(), ring_.full[at_.index], tile * rows, chunk * kStageLines, policy_);
        advance();
      }
  }

  // One tile, whose rows begin with `row`.
  __device__ void read_rows(int chunks, const CUtensorMap& map, int row, int first_chunk = 0) {
#pragma unroll 1
    for (int chunk = first_chunk; chunk < first_chunk + chunks; ++chunk) {
      make_room();
      copy_stage(map, place(), ring_.full[at_.index], row, chunk * kStageLines, policy_);
      advance();
    }
  }

  // Asks the L2 for gate and up of the next chain, from behind what its ring takes before attention has
  // ended. A stage at a time, as long as this CTA multiplies: memory has nothing else to do, and x does not
  // wait behind more than a stage. Whoever brings more at once holds up attention.
  __device__ void read_ahead(const View& output, const View& gate, const Ahead& ahead) {
    constexpr uint32_t kPace = 1200;  // clocks; memory brings a stage to each CTA in 930
    constexpr int kMostStages = 10;
    const int first = max(a_.stages - stages_of(output), 0) / gate.chunks;
    const int end = min(first + kMostStages / gate.chunks, gate.end), last = asked_ - 1;
    const uint32_t row_bytes = gate.units * (kUnit / 2), group_bytes = gate.chunks * (kStageGroups * 4);
    uint32_t due = static_cast<uint32_t>(clock()) + kPace;
#pragma unroll 1
    for (int tile = first; tile < end; ++tile) {
#pragma unroll 1
      while (static_cast<int32_t>(static_cast<uint32_t>(clock()) - due) < 0)
        if (ring_.empty[last % a_.stages].has_ended(last / a_.stages & 1)) return;
      due += kPace * gate.chunks;
      const int row = tile_at<kForm>(tile) * (kTile / 2), rows = min(kTile / 2, gate.outputs - row);
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        const int64_t at = row + half * gate.outputs;
        prefetch_bytes(ahead.codes + at * row_bytes, rows * row_bytes);
        prefetch_bytes(ahead.groups + at * group_bytes, rows * group_bytes);
      }
    }
  }

  // Those of a CTA, of what tells the experts ahead.
  __device__ void read_pieces(const Foresight& f) {
#pragma unroll 1
    for (int index = Piece::first(); index < f.pieces; index += static_cast<int>(gridDim.x)) {
      const Piece piece = Piece::of(f, index);
      read_rows(piece.count, f.weights, piece.row, piece.begin);
    }
  }

  // Stages from `begin` up to `end` of gate and up of these experts: a tile is one expert's. The shared one
  // comes behind them. Stages are counted on from the router's: x was there before the choice.
  __device__ void read_gates(const View& view, const int* ids, int begin, int end) {
    const CUtensorMap &map = a_.weights[Order<true>::kGate], &shared = a_.shared[0];
    const int tiles = view.part / (kTile / 2);  // of an expert
#pragma unroll 1
    for (int stage = begin; stage < end; ++stage) {
      const int done = stage / view.chunks, line = (stage - done * view.chunks) * kStageLines;
      const int tile = gate_tile_at(view.first + done, view.first, view.leading);
      const int rank = tile / tiles, row = (tile - rank * tiles) * (kTile / 2);
      make_room();
      if (rank < a_.num_chosen)
        copy_expert_stage(map, place(), ring_.full[at_.index], {row, line}, ids[rank], policy_);
      else
        copy_stage(shared, place(), ring_.full[at_.index], row, line, policy_);
      advance();
    }
  }

  // Their down, as one matrix of all inner sizes one behind another: each quarter of a stage is of the expert
  // that it belongs to. What a stage lacks at the end is the last quarter again; x is zero there. Where the
  // quarters of a stage are is found out first, so that one need not wait for the other.
  __device__ void read_downs(const View& view, const CUtensorMap& map, const CUtensorMap& shared,
                             const int* ids) {
    of_phase_ = 0;  // others still make x of it, and wait for their last weights
#pragma unroll 1
    for (int tile = view.first; tile < view.end; ++tile) {
      int rank = 0, unit = 0, left = view.units;
#pragma unroll 1
      for (int chunk = 0; chunk < view.chunks; ++chunk) {
        const CUtensorMap* maps[kSteps];
        int experts[kSteps], lines[kSteps];
#pragma unroll
        for (int q = 0; q < kSteps; ++q) {
          const bool is_chosen = rank < a_.num_chosen;
          maps[q] = is_chosen ? &map : &shared;
          experts[q] = is_chosen ? ids[rank] : 0;
          lines[q] = unit * kQuarterLines;
          if (--left > 0 && ++unit == view.part) {
            unit = 0;
            ++rank;
          }
        }
        // When the ring is full of down, x is not there yet: memory would idle.
        if (of_phase_ == a_.stages) {
#pragma unroll
          for (int q = 0; q < kSteps; ++q) prefetch_box(*maps[q], {0, tile * kTile, 0, lines[q]}, experts[q]);
        }
        make_room();
        PhaseBarrier& full = ring_.full[at_.index];
        full.arrive_expecting(kStageBytes);
#pragma unroll
        for (int q = 0; q < kSteps; ++q)
          copy_box(*maps[q], place() + q * kStepBytes, full, {0, tile * kTile, 0, lines[q]}, experts[q],
                   policy_);
        advance();
      }
    }
  }

 private:
  __device__ __forceinline__ void read_grouped(const View& view, const CUtensorMap& map,
                                               const CUtensorMap& groups, int tile, int chunk) {
    const int rows = view.kind == Kind::kGate ? kTile / 2 : kTile;
    make_room();
    copy_grouped_stage<group_lines(kForm)>(map, groups, place(), ring_.full[at_.index], tile * rows, chunk,
                                           policy_);
    advance();
  }

  __device__ __forceinline__ void make_room() {
    // Behind so many stages of a phase its rows are there, and nothing waits behind weights.
    const int most = kOfExperts && asked_ < a_.stages ? a_.in_advance
                     : of_phase_ < a_.stages          ? a_.in_flight
                                                      : a_.in_stream;
#pragma unroll 1
    while (under_way_ >= most) {
      ring_.full[arrived_.index].wait(arrived_.parity);
      arrived_.advance(a_.stages);
      --under_way_;
    }
    if (asked_ >= a_.stages) ring_.empty[at_.index].wait(at_.parity ^ 1);
  }
  __device__ __forceinline__ uint32_t place() const { return ring_at_ + at_.index * ring_bytes(kForm); }
  __device__ __forceinline__ void advance() {
    at_.advance(a_.stages);
    ++asked_;
    ++of_phase_;
    ++under_way_;
  }

  const Arguments& a_;
  Ring& ring_;
  const uint32_t ring_at_;
  const uint64_t policy_;
  RingCursor at_, arrived_;
  int asked_ = 0, of_phase_ = 0, under_way_ = 0;  // stages
};

// A lane's weights of a stage, on their way from the ring into the tensor cores.
template <Form kForm>
struct Weights {
  uint4 of[kSteps];
  int stage;
};
template <>
struct Weights<Form::kInt4> {
  uint4 of[kSteps];
  int stage;
  uint32_t groups[kSteps];
};
template <>
struct Weights<Form::kFine4> {
  uint32_t of[kSteps][4];
  int stage;
  uint32_t groups[kSteps][4];
};
template <>
struct Weights<Form::kFine8> {
  uint32_t of[kSteps][4];
  int stage;
  uint32_t groups[kSteps][2];
};
template <>
struct Weights<Form::kFineFloat8> : Weights<Form::kFine8> {};

template <Form kForm>
class RingEnd {
 public:
  __device__ RingEnd(Ring& ring, uint32_t ring_at, int warp, int lane, int stages)
      : ring_(ring),
        lane_at_(ring_at + lane_in_stage(warp, lane)),
        groups_at_(ring_at + kStageBytes +
                   (is_fine(kForm) ? lane_in_fine_groups(16 / packed(kForm), warp, lane)
                                   : lane_in_groups(warp, lane))),
        lane_(lane),
        stages_(stages) {}

  // The next stage, when it is there.
  __device__ __forceinline__ void take(Weights<kForm>& w) {
    ring_.full[at_.index].wait(at_.parity);
    load(w, at_.index);
    at_.advance(stages_);
  }

  // The next two, when both are there.
  __device__ __forceinline__ void take(Weights<kForm>& first, Weights<kForm>& second) {
    const RingCursor one = at_;
    at_.advance(stages_);
    ring_.full[one.index].wait(one.parity);
    ring_.full[at_.index].wait(at_.parity);
    load(first, one.index);
    load(second, at_.index);
    at_.advance(stages_);
  }

  // They are in registers: their place can be filled again.
  __device__ __forceinline__ void give_back(const Weights<kForm>& w) {
    __syncwarp();
    if (lane_ == 0) ring_.empty[w.stage].arrive();
  }
  __device__ __forceinline__ void give_back(const Weights<kForm>& first, const Weights<kForm>& second) {
    __syncwarp();
    if (lane_ > 0) return;
    ring_.empty[first.stage].arrive();
    ring_.empty[second.stage].arrive();
  }

 private:
  __device__ __forceinline__ void load(Weights<kForm>& w, int stage) const {
    w.stage = stage;
    const uint32_t from = lane_at_ + stage * ring_bytes(kForm);
    const uint32_t groups = groups_at_ + stage * ring_bytes(kForm);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if constexpr (is_fine(kForm))
        load_16(w.of[s], from + s * kStepBytes);
      else
        w.of[s] = load_16(from + s * kStepBytes);
      if constexpr (kForm == Form::kInt4) w.groups[s] = load_4(groups ^ (s * 32));
      if constexpr (kForm == Form::kFine4) load_16(w.groups[s], groups + s * kGroupBytes);
      if constexpr (is_fine_of_8(kForm)) load_8(w.groups[s], (groups ^ (s % 2 * 64)) + s / 2 * kGroupBytes);
    }
  }

  Ring& ring_;
  const uint32_t lane_at_, groups_at_;
  const int lane_, stages_;
  RingCursor at_;
};

}  // namespace bequest::cuda::chain
