// The loading warpgroup of the wgmma prefill kernel (prefill_wgmma.cuh), and what it shares with the others.
//
// Each of its warps has a task of its own, so that none waits for another's memory:
//
//   warp 0     draws tickets, publishes items, asks the copy engine for keys and values, block by block
//   warps 1, 2 copy the queries of one multiplying warpgroup each
//   warp 3     zeroes the rows of values that hold no key of the item: what lies there may be NaN, and a
//   weight
//              of 0 would not hide it. Keys need no such care, their scores are replaced.
//
// All of them run ahead of the products as far as buffers allow, across items.
#pragma once

#include <cuda_runtime.h>

#include <bit>

#include "attention/device_args.cuh"
#include "attention/hopper.cuh"
#include "attention/tensor_core.cuh"

namespace bequest {

inline constexpr int kMultipliers = 2;      // warpgroups that multiply
inline constexpr int kMultiplierRows = 64;  // of one of them
inline constexpr int kTileKeys = 128;
inline constexpr int kLog2UnitKeys = std::bit_width(static_cast<uint32_t>(kUnitKeys)) - 1;
inline constexpr int kTasks = 2;                           // that are published, with their queries
inline constexpr int kTaskReaders = 3 + kMultipliers * 4;  // warps that read a published task

struct PrefillTask {
  WorkItem item;
  int32_t head;  // -1: there is no more work

  __device__ int first_key() const { return item.kv_begin / kUnitKeys * kUnitKeys; }
  __device__ int last_tile_key() const {
    return first_key() + (item.kv_end - first_key() - 1) / kTileKeys * kTileKeys;
  }
  // Whether one unit holds all keys of its last tile.
  __device__ bool has_narrow_end() const { return item.kv_end - last_tile_key() <= kUnitKeys; }
};

// A place in a ring of n buffers, and the parity of its current round.
template <int n>
struct Cursor {
  int index = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    index = index + 1 == n ? 0 : index + 1;
    parity ^= index == 0;
  }
};

// "full": the buffer holds what it should; "empty": nobody needs it any more.
template <int kStages>
struct PrefillControl {
  uint64_t queries_full[kTasks][kMultipliers];
  uint64_t queries_empty[kTasks][kMultipliers];
  uint64_t keys_full[kStages];
  uint64_t keys_empty[kStages];
  uint64_t values_full[kStages];
  uint64_t values_empty[kStages];
  uint64_t edge_landed[kStages];  // values of which some rows have to be zeroed before they are full
  uint64_t task_full[kTasks];
  uint64_t task_empty[kTasks];
  PrefillTask tasks[kTasks];

  __device__ void init() {
    for (int i = 0; i < kStages; ++i) {
      init_barrier(shared_address(&keys_full[i]), 1);
      init_barrier(shared_address(&keys_empty[i]), kMultipliers * 4);
      init_barrier(shared_address(&values_full[i]), 1);
      init_barrier(shared_address(&values_empty[i]), kMultipliers * 4);
      init_barrier(shared_address(&edge_landed[i]), 1);
    }
    for (int i = 0; i < kTasks; ++i) {
      init_barrier(shared_address(&task_full[i]), 1);
      init_barrier(shared_address(&task_empty[i]), kTaskReaders);
      for (int j = 0; j < kMultipliers; ++j) {
        init_barrier(shared_address(&queries_full[i][j]), 1);
        init_barrier(shared_address(&queries_empty[i][j]), 4);
      }
    }
    publish_barriers();
  }
};

template <int D>
struct PrefillBuffers {
  static constexpr int kStages = 2;
  static constexpr int kPanels = D / kPanelColumns;
  static constexpr int kQueryPanelBytes = kMultiplierRows * kPanelRowBytes;
  static constexpr int kTilePanelBytes = kTileKeys * kPanelRowBytes;
  static constexpr int kTileBytes = kPanels * kTilePanelBytes;
  using Control = PrefillControl<kStages>;

  alignas(1024) uint8_t queries[kTasks][kMultipliers][kPanels * kQueryPanelBytes];
  alignas(1024) uint8_t keys[kStages][kTileBytes];
  alignas(1024) uint8_t values[kStages][kTileBytes];
  Control control;
};

// The tasks in the order in which they are published. By a whole warp.
template <class Control>
class TaskReader {
 public:
  __device__ explicit TaskReader(Control& control) : control_(control) {}

  __device__ PrefillTask next() {
    wait(shared_address(&control_.task_full[cursor_.index]), cursor_.parity);
    const PrefillTask& slot = control_.tasks[cursor_.index];
    const WorkItem& item = slot.item;
    const PrefillTask task{
        {same(item.sequence), same(item.first_token), same(item.num_tokens), same(item.first_position),
         same(item.kv_begin), same(item.kv_end), same(item.state_row), -1},
        same(slot.head)};
    if (threadIdx.x % 32 == 0) arrive(shared_address(&control_.task_empty[cursor_.index]));
    cursor_.advance();
    return task;
  }

 private:
  // A value that all lanes have: the compiler then keeps what follows from it in uniform registers.
  __device__ static int same(int value) { return __shfl_sync(0xffffffffu, value, 0); }

  Control& control_;
  Cursor<kTasks> cursor_;
};

// Warp 0.
template <int D>
class KeyLoader {
 public:
  using B = PrefillBuffers<D>;

  __device__ KeyLoader(const AttentionArgs& a, const CUtensorMap& map, B& buffers)
      : a_(a),
        map_(map),
        buffers_(buffers),
        lane_(threadIdx.x % 32),
        log2_box_(min(a.log2_block_size, kLog2UnitKeys)),
        box_keys_(1 << log2_box_) {}

  __device__ void run() {
    const Tickets tickets(a_);
    for (int ticket = tickets.first();;) {
      publish(ticket);
      if (ticket < 0) break;
      int next = 0;
      if (lane_ == 0) next = tickets.draw();
      load(load_item(a_.items, ticket / a_.num_kv_heads), ticket % a_.num_kv_heads);
      ticket = __shfl_sync(0xffffffffu, next, 0);
    }
    if (lane_ == 0) tickets.finish();
  }

 private:
  __device__ void publish(int ticket) {
    auto& control = buffers_.control;
    wait(shared_address(&control.task_empty[task_.index]), task_.parity ^ 1);
    if (lane_ == 0) {
      PrefillTask& task = control.tasks[task_.index];
      if (ticket >= 0) task.item = load_item(a_.items, ticket / a_.num_kv_heads);
      task.head = ticket < 0 ? -1 : ticket % a_.num_kv_heads;
      arrive(shared_address(&control.task_full[task_.index]));
    }
    __syncwarp();
    task_.advance();
  }

  __device__ void load(const WorkItem& item, int head) {
    const int32_t* table = a_.block_tables + item.sequence * a_.max_blocks;
    const int first_key = item.kv_begin / kUnitKeys * kUnitKeys;
    int id = block_id(item, table, first_key);
    for (int key = first_key; key < item.kv_end; key += kTileKeys) {
      const int next_id = block_id(item, table, key + kTileKeys);
      load_tile(item, head, key, id);
      id = next_id;
    }
  }

  // The block of the lane's box in the tile at `key`.
  __device__ int block_id(const WorkItem& item, const int32_t* table, int key) const {
    const int box_key = key + (lane_ << log2_box_);
    const bool needed = box_key < min(item.kv_end, key + kTileKeys) && box_key + box_keys_ > item.kv_begin;
    return needed ? __ldg(table + (box_key >> a_.log2_block_size)) : 0;
  }

  __device__ void load_tile(const WorkItem& item, int head, int key, int id) {
    auto& control = buffers_.control;
    const int begin = max(item.kv_begin - key, 0) >> log2_box_;
    const int end = (min(item.kv_end - key, kTileKeys) + box_keys_ - 1) >> log2_box_;
    const bool is_edge = key < item.kv_begin || key + kTileKeys > item.kv_end;
    const uint32_t parity = stage_.parity ^ 1;
    const Boxes boxes{begin, end, key & (a_.block_size - 1), id};
    wait(shared_address(&control.keys_empty[stage_.index]), parity);
    load_boxes(boxes, buffers_.keys[stage_.index], &control.keys_full[stage_.index], head * a_.block_size);
    wait(shared_address(&control.values_empty[stage_.index]), parity);
    load_boxes(boxes, buffers_.values[stage_.index],
               is_edge ? &control.edge_landed[stage_.index] : &control.values_full[stage_.index],
               (a_.num_kv_heads + head) * a_.block_size);
    stage_.advance();
  }

  struct Boxes {
    int begin, end;  // which of the tile's
    int offset;      // of the tile's first key in its block
    int id;          // the block of box `lane`
  };

  // `head_row`: the head's first row in a block.
  __device__ void load_boxes(const Boxes& boxes, uint8_t* tile, uint64_t* full, int head_row) const {
    const uint32_t barrier = shared_address(full);
    if (lane_ == 0)
      arrive_expecting(barrier, (boxes.end - boxes.begin) * B::kPanels * (box_keys_ * kPanelRowBytes));
    for (int box = boxes.begin; box < boxes.end; ++box) {
      const int block = __shfl_sync(0xffffffffu, boxes.id, box);
      const int row = head_row + ((boxes.offset + (box << log2_box_)) & (a_.block_size - 1));
      if (lane_ == 0) {
#pragma unroll
        for (int panel = 0; panel < B::kPanels; ++panel)
          copy_box(map_,
                   shared_address(tile) + panel * B::kTilePanelBytes + (box << log2_box_) * kPanelRowBytes,
                   barrier, panel * kPanelColumns, row, block);
      }
    }
    __syncwarp();
  }

  const AttentionArgs& a_;
  const CUtensorMap& map_;
  B& buffers_;
  const int lane_;
  const int log2_box_;
  const int box_keys_;  // keys that one copy brings
  Cursor<kTasks> task_;
  Cursor<B::kStages> stage_;
};

// row / group for rows of a tile, without a division.
class GroupDivider {
 public:
  __device__ explicit GroupDivider(int group) : group_(group), reciprocal_((1 << 16) / group + 1) {}
  __device__ int token(int row) const { return row * reciprocal_ >> 16; }
  __device__ int head(int row) const { return row - token(row) * group_; }

 private:
  const int group_, reciprocal_;
};

// Warps 1 and 2: the queries of warpgroup `multiplier`, a tile of zeros below the item's last row.
template <int D>
__device__ void load_queries(const AttentionArgs& a, PrefillBuffers<D>& buffers, int multiplier) {
  using B = PrefillBuffers<D>;
  constexpr int kChunks = D / 8;
  auto& control = buffers.control;
  const int lane = threadIdx.x % 32;
  const int chunk = lane % kChunks;
  const GroupDivider divider(a.group);
  TaskReader tasks(control);
  Cursor<kTasks> slot;
  for (PrefillTask task = tasks.next(); task.head >= 0; task = tasks.next(), slot.advance()) {
    wait(shared_address(&control.queries_empty[slot.index][multiplier]), slot.parity ^ 1);
    const uint32_t target =
        shared_address(buffers.queries[slot.index][multiplier]) + chunk / 8 * B::kQueryPanelBytes;
    const bf16* source = static_cast<const bf16*>(a.q) + task.item.first_token * a.q_stride +
                         task.head * a.group * D + chunk * 8;
    const int rows = task.item.num_tokens * a.group;
#pragma unroll 4
    for (int i = lane / kChunks; i < kMultiplierRows; i += 32 / kChunks) {
      const int row = multiplier * kMultiplierRows + i;
      copy_16_async(target + panel_offset(i, chunk % 8),
                    source + divider.token(row) * a.q_stride + divider.head(row) * D, row < rows);
    }
    commit_copies();
    wait_copies<0>();
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) arrive(shared_address(&control.queries_full[slot.index][multiplier]));
  }
}

// Warp 3.
template <int D>
__device__ void clear_edges(PrefillBuffers<D>& buffers) {
  using B = PrefillBuffers<D>;
  auto& control = buffers.control;
  const int lane = threadIdx.x % 32;
  TaskReader tasks(control);
  Cursor<B::kStages> stage;
  uint32_t parities = 0;  // bit i: of edge_landed[i]
  for (PrefillTask task = tasks.next(); task.head >= 0; task = tasks.next()) {
    for (int key = task.first_key(); key < task.item.kv_end; key += kTileKeys, stage.advance()) {
      const int begin = max(task.item.kv_begin - key, 0), end = min(task.item.kv_end - key, kTileKeys);
      if (begin == 0 && end == kTileKeys) continue;
      wait(shared_address(&control.edge_landed[stage.index]), parities >> stage.index & 1);
      parities ^= 1u << stage.index;
      const int used = end <= kUnitKeys ? kUnitKeys : kTileKeys;  // keys that are multiplied
      uint8_t* tile = buffers.values[stage.index];
      for (int i = lane; i < B::kTileBytes / 16; i += 32) {
        const int row = i / 8 % kTileKeys;
        if (row < begin || (row >= end && row < used)) *reinterpret_cast<uint4*>(tile + i * 16) = {};
      }
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) arrive(shared_address(&control.values_full[stage.index]));
    }
  }
}

// A launch of Tickets' blocks; by the whole warpgroup.
template <int D>
__device__ void load_all(const AttentionArgs& a, const CUtensorMap& map, PrefillBuffers<D>& buffers) {
  const int warp = threadIdx.x / 32;
  if (warp == 0)
    KeyLoader<D>(a, map, buffers).run();
  else if (warp == 3)
    clear_edges<D>(buffers);
  else
    load_queries<D>(a, buffers, warp - 1);
}

}  // namespace bequest
