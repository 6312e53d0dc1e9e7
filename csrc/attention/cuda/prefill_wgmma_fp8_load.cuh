// The loading warpgroup of the wgmma prefill kernel over an fp8 cache (prefill_wgmma_fp8.cuh).
//
// The products read float16, which e4m3 is exact in. So keys and values arrive as they are stored, a unit at
// a time, and a warp widens each unit into the tile of panels that the products expect. Each warp has a task
// of its own:
//
//   warp 0  draws tickets, publishes them as tasks, asks the copy engine for units of keys
//   warp 1  widens keys
//   warp 2  asks for queries and for units of values, and for results to be stored
//   warp 3  widens values; rows that hold no key of the item become zeros: what lies there may be NaN, and a
//           weight of 0 would not hide it. Keys need no such care, their scores are replaced.
//
// Counted for a tile of 128 keys of 128 dimensions, where the products take 2,048 cycles: a widening warp has
// 32 loads and 64 stores of 16 bytes per lane, and 256 conversions of a pair at two cycles each, about 1,200
// cycles with what it waits for. Shared memory moves 128 KiB for the products, whose queries are in
// registers, 32 for the copies, 32 and 64 for widening: 2,048 cycles, where a cache in bf16 takes 1,792 and
// the kernel about 3,000.
#pragma once

#include <cuda_runtime.h>

#include "attention/cuda/device_args.cuh"
#include "attention/cuda/kv_formats.cuh"
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

  __device__ void init() {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(1);
      empty[i].init(1);
    }
  }
};

template <int D>
struct Fp8PrefillBuffers : PrefillBuffers<D> {
  // Widening warps keep what they convert in registers, and 40 make them spill. 224 are enough to multiply.
  static constexpr int kLoaderRegisters = 56, kMultiplierRegisters = 224;
  static constexpr int kUnitBytes = kUnitKeys * D;
  static constexpr int kUnitStages = D == 64 ? 4 : 2;
  using Ring = UnitRing<kUnitStages, kUnitBytes>;

  Ring stored_keys;
  Ring stored_values;

  __device__ void init(int group) {
    stored_keys.init();
    stored_values.init();
    this->control.init(has_query_boxes(group) ? 1 : 32);  // last, as it publishes all
  }
};
static_assert(sizeof(Fp8PrefillBuffers<64>) <= 227 * 1024);
static_assert(sizeof(Fp8PrefillBuffers<128>) <= 227 * 1024);

// Brings an item's keys, or its values, to a ring. By a whole warp.
template <int D>
class UnitLoader {
 public:
  using B = Fp8PrefillBuffers<D>;

  __device__ UnitLoader(const BoxLoader& boxes, typename B::Ring& ring) : boxes_(boxes), ring_(ring) {}

  // Calls meanwhile() behind the first tile.
  template <class F>
  __device__ __forceinline__ void load(const WorkItem& item, int head, F&& meanwhile) {
    const auto load_tile = [&](const BoxTile& tile) {
#pragma unroll 1
      for (int at = 0; at < min(kTileKeys, item.kv_end - tile.key); at += kUnitKeys, stage_.advance()) {
        ring_.empty[stage_.index].wait(stage_.parity ^ 1);
        PhaseBarrier& barrier = ring_.full[stage_.index];
        const uint32_t target = shared_address(ring_.units[stage_.index]);
        boxes_.load_boxes(item, tile, at, kUnitKeys, barrier, D,
                          [&](const CUtensorMap& map, int box, int row, int block) {
                            copy_box(map, target + (box - at) * D, barrier, 0, row, block);
                          });
      }
    };
    boxes_.each_tile(item, head, load_tile, meanwhile);
  }

 private:
  const BoxLoader boxes_;
  typename B::Ring& ring_;
  Cursor<B::kUnitStages> stage_;
};

// Widens units of e4m3 into tiles of float16. By a whole warp.
//
// A load takes 16 stored bytes of a lane, which become two neighbouring chunks of a row of a panel. Eight
// lanes are served at once, both when they load and when they store. Where a row fills a panel and no more
// (D = 64), they have two rows side by side, whose chunks the swizzle places apart. Where a row has two
// panels, four of them have one row's part of the first and four the next row's part of the second: these lie
// in different banks on both sides.
template <int D>
class UnitWidener {
 public:
  using B = Fp8PrefillBuffers<D>;

  __device__ UnitWidener() {
    const int lane = threadIdx.x % 32;
    const int panel = D == 64 ? 0 : lane / 4 % 2;
    const int row = D == 64 ? lane / 4 : lane / 16 * 2 + (lane / 8 + panel) % 2;
    source_ = row * D + panel * 64 + lane % 4 * 16;
    target_ = panel * B::kTilePanelBytes + panel_offset(row, lane % 4 * 2);
  }

  // `unit`: as stored; `target`: the unit's first row in the tile. Rows outside of [begin, end) become zeros
  // if it kMasks.
  template <bool kMasks>
  __device__ __forceinline__ void widen(uint32_t unit, uint32_t target, int begin, int end) const {
    constexpr int kRows = 512 / D;  // that the warp loads at once
    constexpr int kLoads = kUnitKeys / kRows;
    constexpr int kBatch = 4;
    static_assert(D == 64 || D == 128);
    unit += source_;
    target += target_;
#pragma unroll 1
    for (int done = 0; done < kLoads; done += kBatch) {
      uint32_t fours[kBatch][4];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) load_16(fours[i], unit + i * 512);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if constexpr (kMasks) {
          const int row = (done + i) * kRows + static_cast<int>(source_ / D);
          if (row < begin || row >= end) fours[i][0] = fours[i][1] = fours[i][2] = fours[i][3] = 0;
        }
        uint32_t low[4], high[4];
        fp8_to_f16(fours[i][0], low[0], low[1]);
        fp8_to_f16(fours[i][1], low[2], low[3]);
        fp8_to_f16(fours[i][2], high[0], high[1]);
        fp8_to_f16(fours[i][3], high[2], high[3]);
        const uint32_t place = row_place(target, i);
        store_16(place, low);
        store_16(place ^ 16, high);
      }
      unit += kBatch * 512;
      target += kBatch * kRows * kPanelRowBytes;
    }
  }

 private:
  // Of load i of a batch. Four rows further the swizzle flips a bit of the chunk; after eight it is the same.
  __device__ __forceinline__ static uint32_t row_place(uint32_t target, int i) {
    if constexpr (D == 64) return target + i * kSwizzleBytes;
    return (i % 2 ? (target ^ 64) + 4 * kPanelRowBytes : target) + i / 2 * kSwizzleBytes;
  }

  uint32_t source_, target_;
};

// Warps 1 and 3: fills the tiles of one kind from its ring.
template <int D, bool kAreValues>
__device__ void widen_tiles(Fp8PrefillBuffers<D>& buffers) {
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
  const UnitWidener<D> widener;
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
        const int begin = task.item.kv_begin - key - at, end = task.item.kv_end - key - at;
        const uint32_t source = shared_address(ring.units[unit.index()]);
        const uint32_t target = tile + at * kPanelRowBytes;
        if (kAreValues && (begin > 0 || end < kUnitKeys))
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

// Warp 0.
template <int D>
__device__ void load_stored_keys(const AttentionArgs& a, const CUtensorMap& map,
                                 Fp8PrefillBuffers<D>& buffers) {
  UnitLoader<D> loader(BoxLoader(a, map, 0), buffers.stored_keys);
  draw_tasks(a, buffers.control, [&](const PrefillTask task, auto&& meanwhile) {
    loader.load(task.item, task.kv_head(), meanwhile);
  });
}

// Warp 2. An item's queries come before its values: these wait for products, which wait for the queries.
// Nobody waits here until they land, as values would come late to short items.
template <int D>
__device__ void load_queries_and_values(const AttentionArgs& a, const PrefillMaps& maps,
                                        Fp8PrefillBuffers<D>& buffers) {
  QueryLoader<D> queries(a, maps, buffers);
  UnitLoader<D> values(BoxLoader(a, maps.cache, a.num_kv_heads * a.block_size), buffers.stored_values);
  TaskReader tasks(buffers.control);
  for (PrefillTask task = tasks.next(); task.exists(); task = tasks.next()) {
    queries.ask(task);
    values.load(task.item, task.kv_head(), [] {});
  }
  queries.finish();
}

// A launch of Tickets' blocks; by the whole warpgroup.
template <int D>
__device__ void load_all(const AttentionArgs& a, const PrefillMaps& maps, Fp8PrefillBuffers<D>& buffers) {
  switch (threadIdx.x / 32) {
    case 0:
      return load_stored_keys<D>(a, maps.cache, buffers);
    case 1:
      return widen_tiles<D, false>(buffers);
    case 2:
      return load_queries_and_values<D>(a, maps, buffers);
    default:
      return widen_tiles<D, true>(buffers);
  }
}

}  // namespace bequest::cuda
