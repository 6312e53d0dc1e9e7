// What warps multiply on its way into shared memory: for each of them a warp that asks for its tiles, as fast
// as its ring empties, through all layers without a stop.
#pragma once

#include "device/copies.cuh"
#include "model/cuda/row_stack.cuh"

namespace bequest::cuda::stack {

// Of one thread.
template <int A>
class Feeder {
 public:
  __device__ Feeder(const Arguments& a, Shared<A>& shared, uint32_t ring, int warp)
      : a_(a), full_(shared.full[warp]), empty_(shared.empty[warp]), ring_(ring), warp_(warp) {}

  __device__ void run() {
    const Range range(a_);
    const bool attends = place_.cluster < a_.kv_heads;
    pace_ = a_.layer_clocks / tiles_of_layer(range, attends);
    for (int l = 0; l < a_.num_layers; ++l) {
      const Layer& layer = a_.layers[l];
      if (attends) {
        bring_qkv(layer);
        bring_cache(layer, range);
        bring_output(layer);
      }
      bring_gate(layer);
      bring_down(layer);
    }
  }

 private:
  __device__ int tiles_of_layer(const Range& range, bool attends) const {
    const int units = a_.shares[place_.cluster].count, mlp = A * (units + (units + 1) / 2);
    const int mine = max(range.tiles - Range::first_tile(place_.rank, warp_) + kRoundTiles - 1, 0);
    return mlp + (attends ? A * (2 * a_.group + 2) + 2 * (mine / kRoundTiles) : 0);
  }

  __device__ void bring_qkv(const Layer& layer) {
    for (int i = 0; i < a_.group + 2; ++i) {
      const int head = i < a_.group    ? place_.cluster * a_.group + i
                       : i == a_.group ? a_.q_heads + place_.cluster
                                       : a_.q_heads + a_.kv_heads + place_.cluster;
      for (int t = 0; t < A; ++t)
        bring(layer.qkv, head * kHead + place_.rank * kTileRows, (warp_ * A + t) * 2, kTileBytes);
    }
  }

  __device__ void bring_cache(const Layer& layer, const Range& range) {
    const int tiles_of_block = static_cast<int>(a_.layout.block_size) / kTileRows;
    int tile = Range::first_tile(place_.rank, warp_);
    if (tile >= range.tiles) return;
    int block = __ldg(a_.block_table + tile / tiles_of_block);
    for (; tile < range.tiles; tile += kRoundTiles) {
      const int row = tile % tiles_of_block * kTileRows, later = tile + kRoundTiles;
      const int at = static_cast<int>(a_.layout.head_index(block, layer.cache_layer, place_.cluster));
      if (later < range.tiles) block = __ldg(a_.block_table + later / tiles_of_block);
      bring_keys(row, at);
      bring_keys(row, at + a_.kv_heads);
    }
  }

  __device__ void bring_output(const Layer& layer) {
    for (int i = 0; i < A; ++i)
      for (int t = 0; t < a_.group; ++t)
        bring(layer.output, own_row(i), (place_.cluster * a_.group + t) * 2, kTileBytes);
  }

  __device__ void bring_gate(const Layer& layer) {
    const Share share = a_.shares[place_.cluster];
    for (int i = 0; i < share.count; ++i)
      for (int t = 0; t < A; ++t)
        bring(layer.gate_up, (share.first + place_.rank * share.count + i) * kUnit, (warp_ * A + t) * 2,
              kTileBytes);
  }

  __device__ void bring_down(const Layer& layer) {
    const Share share = a_.shares[place_.cluster];
    const int panel = share.first * kUnit / kPanelColumns;
    for (int i = 0; i < A; ++i) {
      for (int t = 0; t < share.count / 2; ++t) bring(layer.down, own_row(i), panel + 2 * t, kTileBytes);
      if (share.count % 2) bring(layer.down_panel, own_row(i), panel + share.count - 1, kPanelBytes);
    }
  }

  // Of the rows that make this warp's columns.
  __device__ int own_row(int i) const { return ((place_.rank * kWarps + warp_) * A + i) * kTileRows; }

  __device__ void bring(const CUtensorMap& map, int row, int panel, uint32_t bytes) {
    const uint32_t to = take_slot(bytes);
    copy_box(map, to, full_[at_.index], {0, row, 0, panel}, policy_);
    at_.advance();
  }
  __device__ void bring_keys(int row, int head) {
    const uint32_t to = take_slot(kTileBytes);
    copy_box(a_.cache, to, full_[at_.index], {0, row, 0, head}, policy_);
    at_.advance();
  }
  __device__ uint32_t take_slot(uint32_t bytes) {
    empty_[at_.index].wait(at_.parity ^ 1);
    while (clock64() - last_ < pace_) {
    }
    last_ = clock64();
    full_[at_.index].arrive_expecting(bytes);
    return ring_ + at_.index * kTileBytes;
  }

  const Arguments& a_;
  PhaseBarrier (&full_)[kSlots], (&empty_)[kSlots];
  const uint32_t ring_;
  const int warp_;
  const Place place_;
  const uint64_t policy_ = read_once_policy();
  Cursor<kSlots> at_;
  int pace_ = 0;
  long long last_ = 0;
};

// The consuming side of a warp's ring.
class Tiles {
 public:
  template <int A>
  __device__ Tiles(Shared<A>& shared, uint32_t ring, int warp)
      : full_(shared.full[warp]), empty_(shared.empty[warp]), ring_(ring) {}

  // The next one.
  __device__ __forceinline__ uint32_t await() const {
    full_[at_.index].wait(at_.parity);
    return ring_ + at_.index * kTileBytes;
  }
  // By the whole warp, when all have read it.
  __device__ __forceinline__ void give_back(int lane) {
    __syncwarp();
    if (lane == 0) empty_[at_.index].arrive();
    at_.advance();
  }

 private:
  PhaseBarrier (&full_)[kSlots], (&empty_)[kSlots];
  const uint32_t ring_;
  Cursor<kSlots> at_;
};

}  // namespace bequest::cuda::stack
