// The loading warpgroup of the wgmma prefill kernel over an fp8 cache (prefill_wgmma_fp8.cuh).
//
// The products read float16, which e4m3 is exact in. So keys and values arrive as they are stored, a unit at
// a time, and a warp widens each unit into the tile of panels that the products expect. Each warp has a task
// of its own:
//
//   warp 0  draws tickets, publishes them as tasks, asks the copy engine for units of keys
//   warp 1  widens keys
//   warp 2  copies queries and makes float16 of them, then asks for units of values
//   warp 3  widens values; rows that hold no key of the item become zeros: what lies there may be NaN, and a
//           weight of 0 would not hide it. Keys need no such care, their scores are replaced.
//
// Counted for a tile of 128 keys of 128 dimensions, where the products take 2,048 cycles: a widening warp has
// 32 loads and 64 stores of 16 bytes per lane, and 256 conversions of a pair at two cycles each, about 1,200
// cycles with what it waits for. Shared memory moves 160 KiB for the products, 32 for the copies, 32 and 64
// for widening: 2,304 cycles, where a cache in bf16 takes 1,792 and the kernel about 3,000.
#pragma once

#include <cuda_runtime.h>

#include "attention/cuda/device_args.cuh"
#include "attention/cuda/kv_formats.cuh"
#include "attention/cuda/prefill_wgmma_fp8_widen.cuh"
#include "attention/cuda/prefill_wgmma_load.cuh"
#include "device/barriers.cuh"
#include "device/copies.cuh"
#include "device/pairs.cuh"
#include "device/reductions.cuh"
#include "device/shared_memory.cuh"
#include "device/warpgroup.cuh"

namespace bequest::cuda {

// A cursor (device/barriers.cuh) in a single register, of which widening warps have none to spare.
template <int n>
struct Turn {
  static_assert((n & (n - 1)) == 0);
  uint32_t turn = 0;

  __device__ uint32_t index() const { return turn % n; }
  __device__ uint32_t parity() const { return turn / n % 2; }
  __device__ void advance() { ++turn; }
};

// Units on their way. "full": the unit has landed; "empty": it has been widened.
template <int kStages, int kBytes>
struct UnitRing {
  alignas(128) uint8_t units[kStages][kBytes];
  PhaseBarrier full[kStages];
  PhaseBarrier empty[kStages];

  __device__ void init(int wideners) {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(1);
      empty[i].init(wideners);
    }
  }
};

template <int D>
struct Fp8PrefillBuffers : PrefillBuffers<D> {
  static constexpr int kUnitBytes = kUnitKeys * D;
  static constexpr int kUnitStages = D == 64 ? 4 : 2;
  using Ring = UnitRing<kUnitStages, kUnitBytes>;

  Ring stored_keys;
  Ring stored_values;

  // `wideners`: warps that widen keys, and as many that widen values.
  __device__ void init(int wideners, int task_readers) {
    stored_keys.init(wideners);
    stored_values.init(wideners);
    this->control.init(wideners, task_readers);  // last, as it publishes all
  }
};
static_assert(sizeof(Fp8PrefillBuffers<64>) <= 227 * 1024);
static_assert(sizeof(Fp8PrefillBuffers<128>) <= 227 * 1024);

// Brings an item's keys, or its values, to a ring. By a whole warp.
template <int D>
class UnitLoader {
 public:
  using B = Fp8PrefillBuffers<D>;

  // `first_row`: of kv head 0 in a block, as the map counts rows.
  __device__ UnitLoader(const AttentionArgs& a, const CUtensorMap& map, typename B::Ring& ring, int first_row)
      : a_(a),
        map_(map),
        ring_(ring),
        first_row_(first_row),
        log2_box_(min(a.log2_block_size, kLog2UnitKeys)),
        box_keys_(1 << log2_box_) {}

  // Calls meanwhile() behind the first tile.
  template <class F>
  __device__ __forceinline__ void load(const WorkItem& item, int head, F&& meanwhile) {
    const int32_t* table = a_.block_tables + item.sequence * a_.max_blocks;
    const int head_row = first_row_ + head * a_.block_size;
    const int first_key = item.kv_begin / kUnitKeys * kUnitKeys;
    int id = block_id(item, table, first_key);
    for (int key = first_key; key < item.kv_end; key += kTileKeys) {
      const int next_id = block_id(item, table, key + kTileKeys);
#pragma unroll 1
      for (int at = 0; at < min(kTileKeys, item.kv_end - key); at += kUnitKeys, stage_.advance()) {
        ring_.empty[stage_.index].wait(stage_.parity ^ 1);
        load_unit(item, key, at, id, head_row);
      }
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

  // The boxes of the unit at key + at that hold keys of the item; `id`: the block of the tile's box `lane`.
  __device__ __forceinline__ void load_unit(const WorkItem& item, int key, int at, int id,
                                            int head_row) const {
    const uint32_t target = shared_address(ring_.units[stage_.index]);
    PhaseBarrier& barrier = ring_.full[stage_.index];
    const int first_box = at >> log2_box_;
    const int begin = max(max(item.kv_begin - key, 0) >> log2_box_, first_box);
    const int end = (min(item.kv_end - key, at + kUnitKeys) + box_keys_ - 1) >> log2_box_;
    if (is_elected()) barrier.arrive_expecting((end - begin) * (box_keys_ * D));
    for (int first = begin; first < end; first += kBoxes) {
      int blocks[kBoxes];
#pragma unroll
      for (int i = 0; i < kBoxes; ++i) blocks[i] = __shfl_sync(kAllLanes, id, first + i);
      if (is_elected())
#pragma unroll
        for (int i = 0; i < kBoxes; ++i) {
          const int box = (first + i) << log2_box_;
          if (first + i < end)
            copy_box(map_, target + (box - at) * D, barrier, 0,
                     head_row + ((key + box) & (a_.block_size - 1)), blocks[i]);
        }
      __syncwarp();
    }
  }

  static constexpr int kBoxes = 4;  // at a time

  const AttentionArgs& a_;
  const CUtensorMap& map_;
  typename B::Ring& ring_;
  const int first_row_;
  const int log2_box_;
  const int box_keys_;  // keys that one copy brings
  Cursor<B::kUnitStages> stage_;
};

// Fills the tiles of one kind from its ring; by one of kWideners warps that do, the one of this `part`.
template <int D, class Arithmetic, int kWideners, bool kAreValues>
__device__ void widen_tiles(Fp8PrefillBuffers<D>& buffers, int part) {
  using B = Fp8PrefillBuffers<D>;
  constexpr int kStages = kAreValues ? B::kValueStages : B::kKeyStages;
  auto& control = buffers.control;
  auto& ring = kAreValues ? buffers.stored_values : buffers.stored_keys;
  auto& tiles = [&]() -> auto& {
    if constexpr (kAreValues)
      return buffers.values;
    else
      return buffers.keys;
  }();
  PhaseBarrier* const full = kAreValues ? control.values_full : control.keys_full;
  PhaseBarrier* const empty = kAreValues ? control.values_empty : control.keys_empty;
  const bool is_first_lane = threadIdx.x % 32 == 0;
  constexpr int kRows = kUnitKeys / kWideners;
  const int first_row = part * kRows;  // of a unit
  const UnitWidener<D, Arithmetic, kRows> widener;
  TaskReader tasks(control);
  Turn<kStages> stage;
  Turn<B::kUnitStages> unit;
  for (PrefillTask task = tasks.next(); task.exists(); task = tasks.next()) {
    for (int key = task.first_key(); key < task.item.kv_end; key += kTileKeys, stage.advance()) {
      empty[stage.index()].wait(stage.parity() ^ 1);
      const uint32_t tile = shared_address(tiles[stage.index()]);
#pragma unroll 1
      for (int at = 0; at < min(kTileKeys, task.item.kv_end - key); at += kUnitKeys, unit.advance()) {
        ring.full[unit.index()].wait(unit.parity());
        const int row_key = key + at + first_row;
        const int begin = task.item.kv_begin - row_key, end = task.item.kv_end - row_key;
        const uint32_t source = shared_address(ring.units[unit.index()]) + first_row * D;
        const uint32_t target = tile + (at + first_row) * kPanelRowBytes;
        if (kAreValues && (begin > 0 || end < kRows))
          widener.template widen<true>(source, target, begin, end);
        else
          widener.template widen<false>(source, target, begin, end);
        __syncwarp();
        if (is_first_lane) ring.empty[unit.index()].arrive();
      }
      fence_async_proxy();
      __syncwarp();
      if (is_first_lane) full[stage.index()].arrive();
    }
  }
}

// Warp 0. A task is published when the first keys of the one before are on their way: its queries have time.
template <int D>
__device__ void load_stored_keys(const AttentionArgs& a, const CUtensorMap& map,
                                 Fp8PrefillBuffers<D>& buffers) {
  auto& control = buffers.control;
  const Tickets tickets(a);
  UnitLoader<D> loader(a, map, buffers.stored_keys, 0);
  const bool is_first_lane = threadIdx.x % 32 == 0;
  Cursor<kTasks> next_slot, slot;
  publish(a, control, next_slot, tickets.first());
  while (control.tasks[slot.index].exists()) {
    MaybeIndex ticket = MaybeIndex::none();
    if (is_first_lane) ticket = tickets.draw();
    const PrefillTask task = control.tasks[slot.index];
    loader.load(task.item, task.kv_head(),
                [&] { publish(a, control, next_slot, MaybeIndex{__shfl_sync(kAllLanes, ticket.code, 0)}); });
    slot.advance();
  }
  if (is_first_lane) tickets.finish();
}

// The values alone.
template <int D>
__device__ void load_stored_values(const AttentionArgs& a, const CUtensorMap& map,
                                   Fp8PrefillBuffers<D>& buffers) {
  UnitLoader<D> values(a, map, buffers.stored_values, a.num_kv_heads * a.block_size);
  TaskReader tasks(buffers.control);
  for (PrefillTask task = tasks.next(); task.exists(); task = tasks.next())
    values.load(task.item, task.kv_head(), [] {});
}

// Warp 2. An item's queries come before its values: these wait for products, which wait for the queries.
template <int D>
__device__ void load_queries_and_values(const AttentionArgs& a, const CUtensorMap& map,
                                        Fp8PrefillBuffers<D>& buffers) {
  QueryLoader<D, Fp8Cache> queries(a, buffers);
  UnitLoader<D> values(a, map, buffers.stored_values, a.num_kv_heads * a.block_size);
  TaskReader tasks(buffers.control);
  for (PrefillTask task = tasks.next(); task.exists(); task = tasks.next()) {
    queries.load(task);
    values.load(task.item, task.kv_head(), [] {});
  }
}

// Of one warpgroup that loads and widens.
inline constexpr int kFp8TaskReaders = kTaskReaders;

// A launch of Tickets' blocks; by the whole warpgroup.
template <int D, class Arithmetic>
__device__ void load_all_fp8(const AttentionArgs& a, const CUtensorMap& map, Fp8PrefillBuffers<D>& buffers) {
  switch (threadIdx.x / 32) {
    case 0:
      return load_stored_keys<D>(a, map, buffers);
    case 1:
      return widen_tiles<D, Arithmetic, 1, false>(buffers, 0);
    case 2:
      return load_queries_and_values<D>(a, map, buffers);
    default:
      return widen_tiles<D, Arithmetic, 1, true>(buffers, 0);
  }
}

// Of a warpgroup that loads and another that widens.
inline constexpr int kSpreadWideners = 2;  // of a kind
inline constexpr int kSpreadTaskReaders = 2 + 2 * kSpreadWideners + kMultipliers * 4;

// Loads as load_all_fp8 does, but leaves widening to widen_all. By the whole first warpgroup.
template <int D>
__device__ void load_all_stored(const AttentionArgs& a, const CUtensorMap& map,
                                Fp8PrefillBuffers<D>& buffers) {
  switch (threadIdx.x / 32) {
    case 0:
      return load_stored_keys<D>(a, map, buffers);
    case 1:
      return load_stored_values<D>(a, map, buffers);
    case 2:
      return load_queries<D, Fp8Cache>(a, buffers);
    default:
      return;
  }
}

// By a whole warpgroup, a warp on each of the four schedulers.
template <int D, class Arithmetic>
__device__ void widen_all(Fp8PrefillBuffers<D>& buffers) {
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32 % 4, 0);
  if (warp < kSpreadWideners)
    widen_tiles<D, Arithmetic, kSpreadWideners, false>(buffers, warp);
  else
    widen_tiles<D, Arithmetic, kSpreadWideners, true>(buffers, warp - kSpreadWideners);
}

}  // namespace bequest::cuda
