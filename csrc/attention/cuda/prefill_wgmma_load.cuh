// The loading warpgroup of the wgmma prefill kernel (prefill_wgmma.cuh), and what it shares with the others.
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

#include <bit>
#include <type_traits>

#include "attention/cuda/device_args.cuh"
#include "attention/cuda/kv_formats.cuh"
#include "attention/cuda/tensor_map.cuh"
#include "device/barriers.cuh"
#include "device/copies.cuh"
#include "device/pairs.cuh"
#include "device/reductions.cuh"
#include "device/shared_memory.cuh"
#include "device/warpgroup.cuh"

namespace bequest::cuda {

inline constexpr int kMultipliers = 2;                 // warpgroups that multiply
inline constexpr int kMultiplierRows = kQueryBoxRows;  // of one of them
inline constexpr int kTileKeys = 128;
inline constexpr int kLog2UnitKeys = std::bit_width(static_cast<uint32_t>(kUnitKeys)) - 1;
inline constexpr int kTasks = 2;                           // that are published, with their queries
inline constexpr int kTaskReaders = 3 + kMultipliers * 4;  // warps that read a published task

struct PrefillTask {
  WorkItem item;
  MaybeIndex head;  // none: there is no more work

  __device__ bool exists() const { return head.exists(); }
  __device__ int kv_head() const { return head.get(); }
  __device__ int first_key() const { return item.kv_begin / kUnitKeys * kUnitKeys; }
  __device__ int last_tile_key() const {
    return first_key() + (item.kv_end - first_key() - 1) / kTileKeys * kTileKeys;
  }
  // Whether one unit holds all keys of its last tile.
  __device__ bool has_narrow_end() const { return item.kv_end - last_tile_key() <= kUnitKeys; }
};

// "full": the buffer holds what it should; "empty": nobody needs it any more.
template <int kKeyStages, int kValueStages>
struct PrefillControl {
  PhaseBarrier queries_full[kTasks][kMultipliers];
  PhaseBarrier queries_empty[kTasks][kMultipliers];
  PhaseBarrier keys_full[kKeyStages];
  PhaseBarrier keys_empty[kKeyStages];
  PhaseBarrier values_full[kValueStages];
  PhaseBarrier values_empty[kValueStages];
  PhaseBarrier edge_landed[kValueStages];  // values of which some rows have to be zeroed before they are full
  PhaseBarrier task_full[kTasks];
  PhaseBarrier task_empty[kTasks];
  PrefillTask tasks[kTasks];

  // `query_arrivals`: that make a multiplier's queries full.
  __device__ void init(int query_arrivals) {
    for (int i = 0; i < kKeyStages; ++i) {
      keys_full[i].init(1);
      keys_empty[i].init(kMultipliers * 4);
    }
    for (int i = 0; i < kValueStages; ++i) {
      values_full[i].init(1);
      values_empty[i].init(kMultipliers * 4);
      edge_landed[i].init(1);
    }
    for (int i = 0; i < kTasks; ++i) {
      task_full[i].init(1);
      task_empty[i].init(kTaskReaders);
      for (int j = 0; j < kMultipliers; ++j) {
        queries_full[i][j].init(query_arrivals);
        queries_empty[i][j].init(4);
      }
    }
    publish_barriers();
  }
};

template <int D>
struct PrefillBuffers {
  static constexpr int kKeyStages = 2, kValueStages = 2;
  static constexpr int kLoaderRegisters = 40, kMultiplierRegisters = 232;  // of a thread
  static constexpr int kPanels = D / kPanelColumns;
  static constexpr int kQueryPanelBytes = kMultiplierRows * kPanelRowBytes;
  static constexpr int kTilePanelBytes = kTileKeys * kPanelRowBytes;
  static constexpr int kTileBytes = kPanels * kTilePanelBytes;
  using Control = PrefillControl<kKeyStages, kValueStages>;

  alignas(1024) uint8_t queries[kTasks][kMultipliers][kPanels * kQueryPanelBytes];
  alignas(1024) uint8_t keys[kKeyStages][kTileBytes];
  alignas(1024) uint8_t values[kValueStages][kTileBytes];
  Control control;

  __device__ void init(int group) { control.init(1); }
};

// The tasks in the order in which they are published. By a whole warp.
template <class Control>
class TaskReader {
 public:
  __device__ explicit TaskReader(Control& control) : control_(control) {}

  __device__ PrefillTask next() {
    control_.task_full[cursor_.index].wait(cursor_.parity);
    const PrefillTask& slot = control_.tasks[cursor_.index];
    const WorkItem& item = slot.item;
    const PrefillTask task{
        {same(item.sequence), same(item.first_token), same(item.num_tokens), same(item.first_position),
         same(item.kv_begin), same(item.kv_end), ResultPlace{same(item.result.code)}, MaybeIndex::none()},
        MaybeIndex{same(slot.head.code)}};
    if (threadIdx.x % 32 == 0) control_.task_empty[cursor_.index].arrive();
    cursor_.advance();
    return task;
  }

 private:
  // A value that all lanes have: the compiler then keeps what follows from it in uniform registers.
  __device__ static int same(int value) { return __shfl_sync(kAllLanes, value, 0); }

  Control& control_;
  Cursor<kTasks> cursor_;
};

// Brings an item's keys, or its values, to the stages of a ring. By a whole warp.
template <int D, int kStages>
class TileLoader {
 public:
  using B = PrefillBuffers<D>;

  // `first_row`: of kv head 0 in a block, as the map counts rows.
  __device__ TileLoader(const AttentionArgs& a, const CUtensorMap& map,
                        uint8_t (&tiles)[kStages][B::kTileBytes], int first_row)
      : a_(a),
        map_(map),
        tiles_(tiles),
        first_row_(first_row),
        log2_box_(min(a.log2_block_size, kLog2UnitKeys)),
        box_keys_(1 << log2_box_) {}

  // A stage is full when its tile has landed; tiles with keys that are not the item's complete `edge`
  // instead. Calls meanwhile() behind the first tile.
  template <class F>
  __device__ void load(const WorkItem& item, int head, PhaseBarrier* full, PhaseBarrier* edge,
                       PhaseBarrier* empty, F&& meanwhile) {
    const int32_t* table = a_.block_tables + item.sequence * a_.max_blocks;
    const int head_row = first_row_ + head * a_.block_size;
    const int first_key = item.kv_begin / kUnitKeys * kUnitKeys;
    int id = block_id(item, table, first_key);
    for (int key = first_key; key < item.kv_end; key += kTileKeys) {
      const int next_id = block_id(item, table, key + kTileKeys);
      const bool is_edge = key < item.kv_begin || key + kTileKeys > item.kv_end;
      empty[stage_.index].wait(stage_.parity ^ 1);
      load_tile(item, key, id, head_row, is_edge ? edge[stage_.index] : full[stage_.index]);
      stage_.advance();
      id = next_id;
      if (key == first_key) meanwhile();
    }
  }

 private:
  // The block of the lane's box in the tile at `key`.
  __device__ int block_id(const WorkItem& item, const int32_t* table, int key) const {
    const int box_key = key + (static_cast<int>(threadIdx.x) % 32 << log2_box_);
    const bool needed = box_key < min(item.kv_end, key + kTileKeys) && box_key + box_keys_ > item.kv_begin;
    return needed ? __ldg(table + (box_key >> a_.log2_block_size)) : 0;
  }

  // The boxes of the tile that hold keys of the item; `id`: the block of box `lane`.
  __device__ void load_tile(const WorkItem& item, int key, int id, int head_row,
                            PhaseBarrier& barrier) const {
    const uint32_t target = shared_address(tiles_[stage_.index]);
    const int begin = max(item.kv_begin - key, 0) >> log2_box_;
    const int end = (min(item.kv_end - key, kTileKeys) + box_keys_ - 1) >> log2_box_;
    if (is_elected()) barrier.arrive_expecting((end - begin) * B::kPanels * (box_keys_ * kPanelRowBytes));
    for (int first = begin; first < end; first += kBoxes) {
      int blocks[kBoxes];
#pragma unroll
      for (int i = 0; i < kBoxes; ++i) blocks[i] = __shfl_sync(kAllLanes, id, first + i);
      if (is_elected())
#pragma unroll
        for (int i = 0; i < kBoxes; ++i) {
          const int at = (first + i) << log2_box_;
          const int row = head_row + ((key + at) & (a_.block_size - 1));
          if (first + i < end)
#pragma unroll
            for (int panel = 0; panel < B::kPanels; ++panel)
              copy_box(map_, target + panel * B::kTilePanelBytes + at * kPanelRowBytes, barrier,
                       panel * kPanelColumns, row, blocks[i]);
        }
      __syncwarp();
    }
  }

  static constexpr int kBoxes = 4;  // at a time

  const AttentionArgs& a_;
  const CUtensorMap& map_;
  uint8_t (&tiles_)[kStages][B::kTileBytes];
  const int first_row_;
  const int log2_box_;
  const int box_keys_;  // keys that one copy brings
  Cursor<kStages> stage_;
};

// Publishes `ticket` as a task; none: the end. By a whole warp.
template <class Control>
__device__ void publish(const AttentionArgs& a, Control& control, Cursor<kTasks>& slot, MaybeIndex ticket) {
  control.task_empty[slot.index].wait(slot.parity ^ 1);
  if (threadIdx.x % 32 == 0) {
    PrefillTask& task = control.tasks[slot.index];
    task.head = ticket.exists() ? MaybeIndex::of(ticket.get() % a.num_kv_heads) : MaybeIndex::none();
    if (ticket.exists()) task.item = load_item(a.items, ticket.get() / a.num_kv_heads);
    control.task_full[slot.index].arrive();
  }
  __syncwarp();
  slot.advance();
}

// Warp 0. A task is published when the keys of the one before begin to be loaded: its queries have time.
template <int D>
__device__ void load_keys(const AttentionArgs& a, const CUtensorMap& map, PrefillBuffers<D>& buffers) {
  auto& control = buffers.control;
  const Tickets tickets(a);
  TileLoader<D, PrefillBuffers<D>::kKeyStages> loader(a, map, buffers.keys, 0);
  const bool is_first_lane = threadIdx.x % 32 == 0;
  Cursor<kTasks> next_slot, slot;
  publish(a, control, next_slot, tickets.first());
  while (control.tasks[slot.index].exists()) {
    MaybeIndex ticket = MaybeIndex::none();
    if (is_first_lane) ticket = tickets.draw();
    const PrefillTask task = control.tasks[slot.index];
    loader.load(task.item, task.kv_head(), control.keys_full, control.keys_full, control.keys_empty,
                [&] { publish(a, control, next_slot, MaybeIndex{__shfl_sync(kAllLanes, ticket.code, 0)}); });
    slot.advance();
  }
  if (is_first_lane) tickets.finish();
}

// Warp 1.
template <int D>
__device__ void load_values(const AttentionArgs& a, const CUtensorMap& map, PrefillBuffers<D>& buffers) {
  auto& control = buffers.control;
  TileLoader<D, PrefillBuffers<D>::kValueStages> loader(a, map, buffers.values,
                                                        a.num_kv_heads * a.block_size);
  TaskReader tasks(control);
  for (PrefillTask task = tasks.next(); task.exists(); task = tasks.next())
    loader.load(task.item, task.kv_head(), control.values_full, control.edge_landed, control.values_empty,
                [] {});
}

// Brings an item's queries. What lies below its last row is any number: such rows are not stored. By a whole
// warp.
//
// The copy engine does it where the rows of a multiplier are whole tokens of a group (has_query_boxes); it
// takes a warp longer than a short item leaves it. Else the warp does.
template <int D>
class QueryLoader {
 public:
  using B = PrefillBuffers<D>;

  __device__ QueryLoader(const AttentionArgs& a, const CUtensorMap& map, B& buffers)
      : a_(a),
        map_(map),
        buffers_(buffers),
        lane_(threadIdx.x % 32),
        chunk_(lane_ % kChunks),
        divider_(a.group) {}

  // They are full when they can be multiplied.
  __device__ __forceinline__ void load(const PrefillTask& task) {
    if (has_query_boxes(a_.group)) return ask_engine(task);
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
  // Products do not see them before a fence.
  __device__ __forceinline__ void ask(const PrefillTask& task) {
    if (has_query_boxes(a_.group)) return ask_engine(task);
    for (int multiplier = 0; multiplier < kMultipliers; ++multiplier) {
      copy(task, multiplier);
      full(multiplier).arrive_behind_copies();
    }
    slot_.advance();
  }

 private:
  static constexpr int kChunks = D / 8;

  __device__ __forceinline__ void ask_engine(const PrefillTask& task) {
    const int head = task.kv_head() * a_.group, tokens = kMultiplierRows / a_.group;
#pragma unroll 1
    for (int multiplier = 0; multiplier < kMultipliers; ++multiplier) {
      buffers_.control.queries_empty[slot_.index][multiplier].wait(slot_.parity ^ 1);
      const uint32_t target = shared_address(buffers_.queries[slot_.index][multiplier]);
      if (is_elected()) {
        full(multiplier).arrive_expecting(B::kPanels * B::kQueryPanelBytes);
#pragma unroll
        for (int panel = 0; panel < B::kPanels; ++panel)
          copy_box(map_, target + panel * B::kQueryPanelBytes, full(multiplier), panel * kPanelColumns, head,
                   task.item.first_token + multiplier * tokens);
      }
      __syncwarp();
    }
    slot_.advance();
  }

  __device__ __forceinline__ void copy(const PrefillTask& task, int multiplier) const {
    const bf16* source = static_cast<const bf16*>(a_.q) + task.item.first_token * a_.q_stride +
                         task.kv_head() * a_.group * D + chunk_ * 8;
    const uint32_t panel =
        shared_address(buffers_.queries[slot_.index][multiplier]) + chunk_ / 8 * B::kQueryPanelBytes;
    const int rows = task.item.num_tokens * a_.group;
    buffers_.control.queries_empty[slot_.index][multiplier].wait(slot_.parity ^ 1);
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
  const CUtensorMap& map_;
  B& buffers_;
  const int lane_, chunk_;
  const GroupDivider divider_;
  Cursor<kTasks> slot_;
};

// Warp 2.
template <int D>
__device__ void load_queries(const AttentionArgs& a, const CUtensorMap& map, PrefillBuffers<D>& buffers) {
  QueryLoader<D> loader(a, map, buffers);
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
      return load_queries<D>(a, maps.queries, buffers);
    default:
      return clear_edges<D>(buffers);
  }
}

}  // namespace bequest::cuda
