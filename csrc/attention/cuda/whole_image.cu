// Heads of towers have 72 or 80 columns: 64, which arrive in shared memory as a panel (device/warpgroup.cuh),
// and up to 16, which lie beside it in rows of 32 bytes. The copy engine fills what a head lacks of these,
// and rows behind the last patch, with zeros.
//
// A thread block has 128 queries of a head and walks all keys in tiles of 128. One warp loads, two warpgroups
// multiply, as in prefill_wgmma.cuh: the scores of tile j + 1 and the product of tile j's weights with its
// values are under way at once, and the two take turns in issuing them.
#include "attention/cuda/whole_image.h"

#include <cuda_runtime.h>

#include <climits>

#include "attention/cuda/device_args.cuh"
#include "attention/cuda/prefill_wgmma_rows.cuh"
#include "device/barriers.cuh"
#include "device/copies.cuh"
#include "device/current_device.cuh"
#include "device/launch.cuh"
#include "device/pairs.cuh"
#include "device/shared_memory.cuh"
#include "device/tensor_map.cuh"
#include "device/warpgroup.cuh"

namespace bequest::cuda {
namespace {

constexpr int kThreads = (1 + kMultipliers) * 128;
constexpr int kRows = kMultipliers * kMultiplierRows;  // queries of a block
constexpr int kStages = 3;                             // tiles of keys, and of values
constexpr int kBeside = 16;                            // columns behind the panel's
constexpr int kBesideBytes = kBeside * 2;
constexpr int kLeast = kPanelColumns + 8, kMost = kPanelColumns + kBeside;  // columns of a head
constexpr int kTileBytes = kTileKeys * (kPanelRowBytes + kBesideBytes);
static_assert(kRows == kTileKeys);

struct Tile {
  alignas(1024) uint8_t panel[kTileKeys * kPanelRowBytes];
  alignas(1024) uint8_t beside[kTileKeys * kBesideBytes];
};

// "full": the tile has landed; "empty": nobody needs it any more.
struct Ring {
  Tile tiles[kStages];
  PhaseBarrier full[kStages];
  PhaseBarrier empty[kStages];

  __device__ void init() {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(1);
      empty[i].init(kMultipliers * 4);
    }
  }
};

struct Buffers {
  Tile queries;
  Ring keys;
  Ring values;
  PhaseBarrier queries_full;
};
static_assert(sizeof(Buffers) <= 227 * 1024);

// [N, 3 NH, D]: 128 rows of one head, by 64 columns and by 16.
struct Maps {
  CUtensorMap panel;
  CUtensorMap beside;
};

struct Args {
  BFloat16* out;
  int num_patches;
  int num_heads;
  int head_dim;
  float score_factor;
};

__device__ __forceinline__ void load_tile(const Maps& maps, const Tile& tile, PhaseBarrier& full, int head,
                                          int patch) {
  full.arrive_expecting(kTileBytes);
  copy_box(maps.panel, shared_address(tile.panel), full, 0, head, patch);
  copy_box(maps.beside, shared_address(tile.beside), full, kPanelColumns, head, patch);
}

// By one thread. `head`: among those of queries; keys' come behind them, and values' behind these.
__device__ void load_all(const Args& a, const Maps& maps, Buffers& buffers, int head, int first_query) {
  load_tile(maps, buffers.queries, buffers.queries_full, head, first_query);
  Cursor<kStages> stage;
  for (int key = 0; key < a.num_patches; key += kTileKeys, stage.advance()) {
    int row = head;
    for (Ring* const ring : {&buffers.keys, &buffers.values}) {
      row += a.num_heads;
      ring->empty[stage.index].wait(stage.parity ^ 1);
      load_tile(maps, ring->tiles[stage.index], ring->full[stage.index], row, key);
    }
  }
}

// 16 columns of rows of 32 bytes, which the copy engine has swizzled by 32: as operand().
__device__ __forceinline__ uint64_t operand_beside(uint32_t address) {
  constexpr uint64_t kSwizzle32 = 3ull << 62;
  return kSwizzle32 | static_cast<uint64_t>(8 * kBesideBytes >> 4) << 32 | 1ull << 16 |
         (address & 0x3ffff) >> 4;
}

// The accumulators o[64, 80] of a warpgroup and the weights they are made of.
class Gathered {
 public:
  __device__ __forceinline__ void clear() {
    for (float& x : panel_) x = 0.0f;
    for (float& x : beside_) x = 0.0f;
  }

  // Issues o += weights · values.
  __device__ __forceinline__ void multiply(const Tile& values) {
    const uint64_t panel = operand(shared_address(values.panel), kSwizzleBytes);
    const uint64_t beside = operand_beside(shared_address(values.beside));
#pragma unroll
    for (int i = 0; i < kTileKeys / 16; ++i) {
      multiply_transposed(panel_, weights_ + 4 * i, advance(panel, i * 16 * kPanelRowBytes), true);
      multiply_transposed(beside_, weights_ + 4 * i, advance(beside, i * 16 * kBesideBytes), true);
    }
  }

  // Until no product is under way.
  __device__ __forceinline__ void wait() {
    wait_products<0>(panel_);
    pin(beside_);
  }

  // Takes a tile's weights over. At rest.
  __device__ __forceinline__ void take(const RowSoftmax<Scores::kPlain>& softmax,
                                       const float (&weights)[kTileKeys / 2]) {
#pragma unroll
    for (int i = 0; i < kTileKeys / 4; ++i) weights_[i] = pack(weights[2 * i], weights[2 * i + 1]);
    if (!softmax.has_moved()) return;
#pragma unroll
    for (int i = 0; i < kPanelColumns / 2; ++i) panel_[i] *= softmax.shrink(i / 2 % 2);
#pragma unroll
    for (int i = 0; i < kBeside / 2; ++i) beside_[i] *= softmax.shrink(i / 2 % 2);
  }

  // Writes row `half` of a lane to `out`, of D columns. At rest.
  __device__ __forceinline__ void store(BFloat16* out, int head_dim, int half, float factor) const {
    const int lane = threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < kMost / 8; ++n) {
      if (n * 8 >= head_dim) break;
      const float* const pair = (n < 8 ? panel_ + n * 4 : beside_ + (n - 8) * 4) + half * 2;
      *reinterpret_cast<uint32_t*>(out + n * 8 + lane) = pack(pair[0] * factor, pair[1] * factor);
    }
  }

 private:
  float panel_[kPanelColumns / 2], beside_[kBeside / 2];
  uint32_t weights_[kTileKeys / 4];
};

// A multiplying warpgroup. Where products are waited for as in prefill_wgmma.cuh, for its reasons.
class Multiplier {
 public:
  __device__ __forceinline__ Multiplier(const Args& a, Buffers& buffers, int index)
      : a_(a), buffers_(buffers), index_(index) {}

  __device__ __forceinline__ void run(int head, int first_query) {
    AttentionArgs of_all{};
    of_all.window = INT_MAX / 2;
    of_all.score_factor = a_.score_factor;
    const WorkItem item{0, first_query,    kRows,          kFarPosition,
                        0, a_.num_patches, ResultPlace{0}, MaybeIndex::none()};
    RowSoftmax<Scores::kPlain> softmax(of_all, item, index_, GroupDivider(1));
    float scores[kTileKeys / 2];
    if (index_ == 1) give_turn(turn(0));
    buffers_.queries_full.wait(0);
    buffers_.keys.full[0].wait(0);
    begin_products();
    multiply_keys(scores);
    commit_products();
    wait_products<0>(scores);
    release_keys();
    softmax.mask(scores, 0);
    softmax.weigh(of_all, scores);
    gathered_.clear();
    for (int key = 0;;) {
      finish_values();
      gathered_.take(softmax, scores);
      key += kTileKeys;
      if (key >= a_.num_patches) break;
      buffers_.keys.full[keys_.index].wait(keys_.parity);
      await_turn(turn(index_));
      begin_products();
      multiply_keys(scores);
      commit_products();
      multiply_values();
      give_turn(turn(1 - index_));
      wait_products<1>(scores);
      release_keys();
      softmax.mask(scores, key);
      softmax.weigh(of_all, scores);
    }
    multiply_values();
    finish_values();
    store(softmax, head, first_query);
  }

 private:
  __device__ __forceinline__ void multiply_keys(float (&scores)[kTileKeys / 2]) const {
    const Tile& tile = buffers_.keys.tiles[keys_.index];
    const uint32_t row = index_ * kMultiplierRows;
    const uint64_t q = operand(shared_address(buffers_.queries.panel) + row * kPanelRowBytes, kSwizzleBytes);
    const uint64_t k = operand(shared_address(tile.panel), kSwizzleBytes);
#pragma unroll
    for (int i = 0; i < kPanelColumns / 16; ++i)
      multiply(scores, advance(q, i * 32), advance(k, i * 32), i > 0);
    multiply(scores, operand_beside(shared_address(buffers_.queries.beside) + row * kBesideBytes),
             operand_beside(shared_address(tile.beside)), true);
  }

  __device__ __forceinline__ void multiply_values() {
    buffers_.values.full[values_.index].wait(values_.parity);
    begin_products();
    gathered_.multiply(buffers_.values.tiles[values_.index]);
    commit_products();
    is_product_pending_ = true;
  }

  // Waits whether a product is under way or not, as the compiler cannot know.
  __device__ __forceinline__ void finish_values() {
    gathered_.wait();
    if (!is_product_pending_) return;
    is_product_pending_ = false;
    release(buffers_.values.empty[values_.index]);
    values_.advance();
  }

  __device__ __forceinline__ void release_keys() {
    release(buffers_.keys.empty[keys_.index]);
    keys_.advance();
  }
  // Each warp answers for its own part of the products.
  __device__ __forceinline__ static void release(PhaseBarrier& empty) {
    if (threadIdx.x % 32 == 0) empty.arrive();
  }

  __device__ __forceinline__ void store(const RowSoftmax<Scores::kPlain>& softmax, int head,
                                        int first_query) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = softmax.d(half);
      const int64_t patch = first_query + multiplier_row(index_) + half * 8;
      if (patch >= a_.num_patches) continue;
      gathered_.store(a_.out + (patch * a_.num_heads + head) * a_.head_dim, a_.head_dim, half, 1.0f / sum);
    }
  }

  __device__ __forceinline__ static int turn(int index) { return 1 + index; }

  const Args& a_;
  Buffers& buffers_;
  const int index_;
  Gathered gathered_;
  bool is_product_pending_ = false;
  Cursor<kStages> keys_, values_;
};

__global__ void __launch_bounds__(kThreads, 1)
    attend_image_kernel(const __grid_constant__ Args a, const __grid_constant__ Maps maps) {
  if constexpr (kIsHopper) {
    extern __shared__ __align__(1024) uint8_t shared[];
    auto& buffers = *reinterpret_cast<Buffers*>(shared);
    if (threadIdx.x == 0) {
      prefetch_map(maps.panel);
      prefetch_map(maps.beside);
      buffers.queries_full.init(1);
      buffers.keys.init();
      buffers.values.init();
      publish_barriers();
    }
    wait_for_previous();
    let_next_start();
    __syncthreads();
    const int first_query = static_cast<int>(blockIdx.x) * kRows, head = static_cast<int>(blockIdx.y);
    const int warpgroup = __shfl_sync(kAllLanes, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
      shrink_registers<40>();
      if (threadIdx.x == 0) load_all(a, maps, buffers, head, first_query);
    } else {
      grow_registers<232>();
      Multiplier(a, buffers, warpgroup - 1).run(head, first_query);
    }
  }
}

CUtensorMap map_of(const ImageAttentionParams& p, int columns, CUtensorMapSwizzle swizzle) {
  const cuuint64_t head = p.head_dim * 2, heads = 3 * p.num_heads;
  const cuuint64_t sizes[] = {cuuint64_t(p.head_dim), heads, cuuint64_t(p.num_patches)};
  const cuuint64_t strides[] = {head, head * heads};
  const cuuint32_t box[] = {cuuint32_t(columns), 1, kTileKeys}, steps[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      tensor_map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(p.qkv), sizes,
                           strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS, "the driver refused a tensor map of an image");
  return map;
}

}  // namespace

bool can_attend_image(int64_t head_dim) {
  return head_dim % 8 == 0 && head_dim >= kLeast && head_dim <= kMost && is_hopper();
}

void attend_image(const ImageAttentionParams& p, Stream stream) {
  check(p.num_patches < kFarPosition && p.num_heads > 0 && p.num_heads <= 65535, "attend_image: sizes");
  check(can_attend_image(p.head_dim), "attend_image: heads");
  check(is_aligned(p.qkv, 16) && is_aligned(p.out, 16), "attend_image: alignment");
  if (p.num_patches == 0) return;
  const Args args{static_cast<BFloat16*>(p.out), static_cast<int>(p.num_patches),
                  static_cast<int>(p.num_heads), static_cast<int>(p.head_dim), p.scale * kLog2E};
  const Maps maps{map_of(p, kPanelColumns, CU_TENSOR_MAP_SWIZZLE_128B),
                  map_of(p, kBeside, CU_TENSOR_MAP_SWIZZLE_32B)};
  const LaunchShape shape{
      .grid = dim3(static_cast<unsigned>(ceil_div(p.num_patches, kRows)), static_cast<unsigned>(p.num_heads)),
      .block = kThreads,
      .shared_bytes = sizeof(Buffers),
      .overlaps_previous = true};
  launch(attend_image_kernel, shape, stream, args, maps);
}

}  // namespace bequest::cuda
