// The loading warpgroup of the wgmma prefill kernel (prefill_wgmma.cuh).
//
// Each of its warps has a task of its own, so that none waits for another's memory:
//
//   warp 0  draws tickets, publishes them as tasks, asks the copy engine for keys, block by block
//   warp 1  asks for values
//   warp 2  asks for queries, or copies them
//   warp 3  zeroes the rows of values that hold no key of the item: what lies there may be NaN, and a weight
//           of 0 would not hide it. Keys need no such care, their scores are replaced.
//
// All of them run ahead of the products as far as buffers allow, across items.
#pragma once

#include <cuda_runtime.h>

#include "attention/cuda/device_args.cuh"
#include "attention/cuda/prefill_wgmma_tasks.cuh"
#include "attention/cuda/tensor_map.cuh"
#include "device/barriers.cuh"
#include "device/copies.cuh"
#include "device/pairs.cuh"
#include "device/reductions.cuh"
#include "device/shared_memory.cuh"
#include "device/warpgroup.cuh"

namespace bequest::cuda {

// A tile of an item's keys, or of its values.
struct BoxTile {
  int key;       // its first
  int id;        // the block of its box `lane`
  int head_row;  // of the head in a block, the first
};

// Brings them in boxes of the copy engine: a block, or a unit where that is less. By a whole warp.
class BoxLoader {
 public:
  // `first_row`: of kv head 0 in a block, as the map counts rows.
  __device__ BoxLoader(const AttentionArgs& a, const CUtensorMap& map, int first_row)
      : a_(a),
        map_(map),
        first_row_(first_row),
        log2_box_(min(a.log2_block_size, kLog2UnitKeys)),
        box_keys_(1 << log2_box_) {}

  // Calls load(tile) for each tile, and meanwhile() behind the first one.
  template <class Load, class F>
  __device__ __forceinline__ void each_tile(const WorkItem& item, int head, Load&& load,
                                            F&& meanwhile) const {
    const int32_t* table = a_.block_tables + item.sequence * a_.max_blocks;
    const int head_row = first_row_ + head * a_.block_size;
    const int first_key = item.kv_begin / kUnitKeys * kUnitKeys;
    int id = block_id(item, table, first_key);
    for (int key = first_key; key < item.kv_end; key += kTileKeys) {
      const int next_id = block_id(item, table, key + kTileKeys);
      load(BoxTile{key, id, head_row});
      id = next_id;
      if (key == first_key) meanwhile();
    }
  }

  // Asks for the boxes that hold keys of the item in [at, at + num_keys) of the tile, which complete
  // `barrier`: calls copy(map, box, row, block) for each, with its place in the tile and in the map, by one
  // thread. `key_bytes`: that it brings of a key.
  template <class Copy>
  __device__ __forceinline__ void load_boxes(const WorkItem& item, const BoxTile& tile, int at, int num_keys,
                                             PhaseBarrier& barrier, int key_bytes, Copy&& copy) const {
    const int begin = max(item.kv_begin - tile.key, at) >> log2_box_;
    const int end = (min(item.kv_end - tile.key, at + num_keys) + box_keys_ - 1) >> log2_box_;
    if (is_elected()) barrier.arrive_expecting((end - begin) * (box_keys_ * key_bytes));
    for (int first = begin; first < end; first += kBoxes) {
      int blocks[kBoxes];
#pragma unroll
      for (int i = 0; i < kBoxes; ++i) blocks[i] = __shfl_sync(kAllLanes, tile.id, first + i);
      if (is_elected())
#pragma unroll
        for (int i = 0; i < kBoxes; ++i) {
          const int box = (first + i) << log2_box_;
          const int row = tile.head_row + ((tile.key + box) & (a_.block_size - 1));
          if (first + i < end) copy(map_, box, row, blocks[i]);
        }
      __syncwarp();
    }
  }

 private:
  // The block of the lane's box in the tile at `key`.
  __device__ int block_id(const WorkItem& item, const int32_t* table, int key) const {
    const int box_key = key + (static_cast<int>(threadIdx.x) % 32 << log2_box_);
    const bool needed = box_key < min(item.kv_end, key + kTileKeys) && box_key + box_keys_ > item.kv_begin;
    return needed ? __ldg(table + (box_key >> a_.log2_block_size)) : 0;
  }

  static constexpr int kBoxes = 4;  // at a time

  const AttentionArgs& a_;
  const CUtensorMap& map_;
  const int first_row_;
  const int log2_box_;
  const int box_keys_;  // keys that one copy brings
};

// Brings an item's keys, or its values, to the stages of a ring. By a whole warp.
template <int D, int kStages>
class TileLoader {
 public:
  using B = PrefillBuffers<D>;

  __device__ TileLoader(const BoxLoader& boxes, uint8_t (&tiles)[kStages][B::kTileBytes])
      : boxes_(boxes), tiles_(tiles) {}

  // A stage is full when its tile has landed; tiles with keys that are not the item's complete `edge`
  // instead. Calls meanwhile() behind the first tile.
  template <class F>
  __device__ void load(const WorkItem& item, int head, PhaseBarrier* full, PhaseBarrier* edge,
                       PhaseBarrier* empty, F&& meanwhile) {
    const auto load_tile = [&](const BoxTile& tile) {
      const bool is_edge = tile.key < item.kv_begin || tile.key + kTileKeys > item.kv_end;
      empty[stage_.index].wait(stage_.parity ^ 1);
      PhaseBarrier& barrier = is_edge ? edge[stage_.index] : full[stage_.index];
      const uint32_t target = shared_address(tiles_[stage_.index]);
      boxes_.load_boxes(item, tile, 0, kTileKeys, barrier, B::kPanels * kPanelRowBytes,
                        [&](const CUtensorMap& map, int box, int row, int block) {
#pragma unroll
                          for (int panel = 0; panel < B::kPanels; ++panel)
                            copy_box(map, target + panel * B::kTilePanelBytes + box * kPanelRowBytes, barrier,
                                     panel * kPanelColumns, row, block);
                        });
      stage_.advance();
    };
    boxes_.each_tile(item, head, load_tile, meanwhile);
  }

 private:
  const BoxLoader boxes_;
  uint8_t (&tiles_)[kStages][B::kTileBytes];
  Cursor<kStages> stage_;
};

// Warp 0.
template <int D>
__device__ void load_keys(const AttentionArgs& a, const CUtensorMap& map, PrefillBuffers<D>& buffers) {
  auto& control = buffers.control;
  TileLoader<D, PrefillBuffers<D>::kKeyStages> loader(BoxLoader(a, map, 0), buffers.keys);
  draw_tasks(a, control, [&](const PrefillTask task, auto&& meanwhile) {
    loader.load(task.item, task.kv_head(), control.keys_full, control.keys_full, control.keys_empty,
                meanwhile);
  });
}

// Warp 1.
template <int D>
__device__ void load_values(const AttentionArgs& a, const CUtensorMap& map, PrefillBuffers<D>& buffers) {
  auto& control = buffers.control;
  TileLoader<D, PrefillBuffers<D>::kValueStages> loader(BoxLoader(a, map, a.num_kv_heads * a.block_size),
                                                        buffers.values);
  TaskReader tasks(control);
  for (PrefillTask task = tasks.next(); task.exists(); task = tasks.next())
    loader.load(task.item, task.kv_head(), control.values_full, control.edge_landed, control.values_empty,
                [] {});
}

// Brings an item's queries. What lies below its last row is any number: such rows are not stored. By a whole
// warp.
//
// The copy engine does it where the rows of a multiplier are whole tokens of a group (has_query_boxes); it
// takes a warp longer than a short item leaves it. Else the warp does. What multipliers leave in place of
// queries is stored by the copy engine, too.
template <int D>
class QueryLoader {
 public:
  using B = PrefillBuffers<D>;

  __device__ QueryLoader(const AttentionArgs& a, const PrefillMaps& maps, B& buffers)
      : a_(a),
        maps_(maps),
        buffers_(buffers),
        lane_(threadIdx.x % 32),
        chunk_(lane_ % kChunks),
        divider_(a.group) {}

  // They are full when they can be multiplied.
  __device__ __forceinline__ void load(const PrefillTask& task) {
    if (has_query_boxes(a_.group)) return ask_engine<false>(task);
    for (int multiplier = 0; multiplier < kMultipliers; ++multiplier) {
      copy(task, multiplier);
      commit_copies();
    }
    for (int multiplier = 0; multiplier < kMultipliers; ++multiplier) {
      if (multiplier == 0)
        wait_copies<1>();
      else
        wait_copies<0>();
      fence_async_proxy();
      __syncwarp();
      if (lane_ == 0) full(multiplier).arrive();
    }
    slot_.advance();
  }

  // They are full when they have landed, which nobody here waits for: 32 arrivals, or one of the engine.
  // Products do not see them before a fence. What a slot's last item has left there is stored first.
  __device__ __forceinline__ void ask(const PrefillTask& task) {
    if (has_query_boxes(a_.group)) return ask_engine<true>(task);
    for (int multiplier = 0; multiplier < kMultipliers; ++multiplier) {
      copy(task, multiplier);
      full(multiplier).arrive_behind_copies();
    }
    slot_.advance();
  }
  // Stores what the last items leave. Behind the last ask().
  __device__ __forceinline__ void finish() {
    if (!has_query_boxes(a_.group)) return;
#pragma unroll 1
    for (int i = 0; i < kTasks; ++i) {
#pragma unroll 1
      for (int multiplier = 0; multiplier < kMultipliers; ++multiplier) {
        wait_empty(multiplier);
        store_results(multiplier);
      }
      remember({});
    }
  }

 private:
  static constexpr int kChunks = D / 8;

  // Where the results of an item belong.
  struct Results {
    int head = 0, token = 0;
    int boxes = 0;  // multipliers that leave one
  };

  template <bool kStores>
  __device__ __forceinline__ void ask_engine(const PrefillTask& task) {
    const int head = task.kv_head() * a_.group, tokens = kMultiplierRows / a_.group;
#pragma unroll 1
    for (int multiplier = 0; multiplier < kMultipliers; ++multiplier) {
      wait_empty(multiplier);
      if constexpr (kStores) store_results(multiplier);
      const uint32_t target = shared_address(buffers_.queries[slot_.index][multiplier]);
      if (is_elected()) {
        full(multiplier).arrive_expecting(B::kPanels * B::kQueryPanelBytes);
#pragma unroll
        for (int panel = 0; panel < B::kPanels; ++panel)
          copy_box(maps_.queries, target + panel * B::kQueryPanelBytes, full(multiplier),
                   panel * kPanelColumns, head, task.item.first_token + multiplier * tokens);
      }
      __syncwarp();
    }
    if constexpr (kStores)
      remember(
          {head, task.item.first_token, has_result_box(a_, task.item, 0) + has_result_box(a_, task.item, 1)});
    else
      slot_.advance();
  }

  __device__ __forceinline__ void wait_empty(int multiplier) const {
    buffers_.control.queries_empty[slot_.index][multiplier].wait(slot_.parity ^ 1);
  }
  // Of the item that was in the slot before.
  __device__ __forceinline__ void store_results(int multiplier) const {
    if (multiplier < older_.boxes && is_elected()) {
      const uint32_t source = shared_address(buffers_.queries[slot_.index][multiplier]);
#pragma unroll
      for (int panel = 0; panel < B::kPanels; ++panel)
        store_box(maps_.results, source + panel * B::kQueryPanelBytes, panel * kPanelColumns, older_.head,
                  older_.token + multiplier * (kMultiplierRows / a_.group));
      wait_stores();
    }
    __syncwarp();
  }
  // Goes to the next slot.
  __device__ __forceinline__ void remember(const Results& of_slot) {
    static_assert(kTasks == 2 && kMultipliers == 2);
    older_ = newer_;
    newer_ = of_slot;
    slot_.advance();
  }

  __device__ __forceinline__ void copy(const PrefillTask& task, int multiplier) const {
    const bf16* source = static_cast<const bf16*>(a_.q) + task.item.first_token * a_.q_stride +
                         task.kv_head() * a_.group * D + chunk_ * 8;
    const uint32_t panel =
        shared_address(buffers_.queries[slot_.index][multiplier]) + chunk_ / 8 * B::kQueryPanelBytes;
    const int rows = task.item.num_tokens * a_.group;
    wait_empty(multiplier);
#pragma unroll 4
    for (int i = lane_ / kChunks; i < kMultiplierRows; i += 32 / kChunks) {
      const int row = multiplier * kMultiplierRows + i;
      copy_16_async(panel + panel_offset(i, chunk_ % 8),
                    source + divider_.token(row) * a_.q_stride + divider_.head(row) * D, row < rows);
    }
  }

  __device__ PhaseBarrier& full(int multiplier) const {
    return buffers_.control.queries_full[slot_.index][multiplier];
  }

  const AttentionArgs& a_;
  const PrefillMaps& maps_;
  B& buffers_;
  const int lane_, chunk_;
  const GroupDivider divider_;
  Cursor<kTasks> slot_;
  Results older_, newer_;  // of the last two items
};

// Warp 2.
template <int D>
__device__ void load_queries(const AttentionArgs& a, const PrefillMaps& maps, PrefillBuffers<D>& buffers) {
  QueryLoader<D> loader(a, maps, buffers);
  TaskReader tasks(buffers.control);
  for (PrefillTask task = tasks.next(); task.exists(); task = tasks.next()) loader.load(task);
}

// Warp 3.
template <int D>
__device__ void clear_edges(PrefillBuffers<D>& buffers) {
  using B = PrefillBuffers<D>;
  auto& control = buffers.control;
  const int lane = threadIdx.x % 32;
  TaskReader tasks(control);
  Cursor<B::kValueStages> stage;
  uint32_t parities = 0;  // bit i: of edge_landed[i]
  for (PrefillTask task = tasks.next(); task.exists(); task = tasks.next()) {
    for (int key = task.first_key(); key < task.item.kv_end; key += kTileKeys, stage.advance()) {
      const int begin = max(task.item.kv_begin - key, 0), end = min(task.item.kv_end - key, kTileKeys);
      if (begin == 0 && end == kTileKeys) continue;
      control.edge_landed[stage.index].wait(parities >> stage.index & 1);
      parities ^= 1u << stage.index;
      const int used = end <= kUnitKeys ? kUnitKeys : kTileKeys;  // keys that are multiplied
      uint8_t* tile = buffers.values[stage.index];
      for (int i = lane; i < B::kTileBytes / 16; i += 32) {
        const int row = i / 8 % kTileKeys;
        if (row < begin || (row >= end && row < used)) *reinterpret_cast<uint4*>(tile + i * 16) = {};
      }
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) control.values_full[stage.index].arrive();
    }
  }
}

// A launch of Tickets' blocks; by the whole warpgroup.
template <int D>
__device__ void load_all(const AttentionArgs& a, const PrefillMaps& maps, PrefillBuffers<D>& buffers) {
  switch (threadIdx.x / 32) {
    case 0:
      return load_keys<D>(a, maps.cache, buffers);
    case 1:
      return load_values<D>(a, maps.cache, buffers);
    case 2:
      return load_queries<D>(a, maps, buffers);
    default:
      return clear_edges<D>(buffers);
  }
}

}  // namespace bequest::cuda
