// What the warpgroups of the wgmma prefill kernel (prefill_wgmma.cuh) share: its tasks, buffers and barriers.
#pragma once

#include <cuda_runtime.h>

#include <bit>

#include "attention/cuda/device_args.cuh"
#include "attention/cuda/tensor_map.cuh"
#include "device/barriers.cuh"
#include "device/reductions.cuh"
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

// Whether a multiplier leaves an item's results where its queries lay, for the copy engine: they are a box if
// all its rows are the item's, and no state.
__device__ __forceinline__ bool has_result_box(const AttentionArgs& a, const WorkItem& item, int multiplier) {
  return has_query_boxes(a.group) && !item.result.is_state() &&
         item.num_tokens * a.group >= (multiplier + 1) * kMultiplierRows;
}

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
    // One lane reads and gives back: what the others have read would have to be waited for.
    const bool reads = threadIdx.x % 32 == 0;
    PrefillTask slot{};
    if (reads) slot = control_.tasks[cursor_.index];
    const WorkItem& item = slot.item;
    const PrefillTask task{
        {same(item.sequence), same(item.first_token), same(item.num_tokens), same(item.first_position),
         same(item.kv_begin), same(item.kv_end), ResultPlace{same(item.result.code)}, MaybeIndex::none()},
        MaybeIndex{same(slot.head.code)}};
    if (reads) control_.task_empty[cursor_.index].arrive();
    cursor_.advance();
    return task;
  }

 private:
  // A value that all lanes have: the compiler then keeps what follows from it in uniform registers.
  __device__ static int same(int value) { return __shfl_sync(kAllLanes, value, 0); }

  Control& control_;
  Cursor<kTasks> cursor_;
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

// Draws tickets until there is none left, and publishes each as a task when the first keys of the one before
// are on their way: its queries have time. load(task, meanwhile) brings a task's keys, and calls meanwhile()
// behind the first tile. By a whole warp.
template <class Control, class Load>
__device__ __forceinline__ void draw_tasks(const AttentionArgs& a, Control& control, Load&& load) {
  const Tickets tickets(a);
  const bool is_first_lane = threadIdx.x % 32 == 0;
  Cursor<kTasks> next_slot, slot;
  publish(a, control, next_slot, tickets.first());
  while (control.tasks[slot.index].exists()) {
    MaybeIndex ticket = MaybeIndex::none();
    if (is_first_lane) ticket = tickets.draw();
    load(control.tasks[slot.index],
         [&] { publish(a, control, next_slot, MaybeIndex{__shfl_sync(kAllLanes, ticket.code, 0)}); });
    slot.advance();
  }
  if (is_first_lane) tickets.finish();
}

}  // namespace bequest::cuda
