#include "model/cuda/row_stack.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "core/check.h"
#include "device/current_device.cuh"
#include "device/launch.cuh"
#include "device/tensor_map.cuh"
#include "device/warpgroup.cuh"
#include "model/cuda/row_stack_attention.cuh"
#include "ops/cuda/activation.cuh"
#include "ops/cuda/hidden_tap.cuh"

namespace bequest::cuda {
namespace stack {

// Of a thread, in two warpgroups that multiply and two that ask for what they multiply.
constexpr int kConsumerRegisters = 216, kFeederRegisters = 40;

template <int A>
class Worker {
 public:
  __device__ Worker(const Arguments& a, Shared<A>& shared, uint32_t ring, int warp, int lane)
      : a_(a),
        shared_(shared),
        tiles_(shared, ring, warp),
        attention_(a, shared, warp, lane),
        columns_(a, shared, warp, lane),
        warp_(warp),
        lane_(lane),
        units_(a.shares[place_.cluster].count),
        rows_first_(rows_first_offset(lane)),
        numbers_(__ldcg(a.launches + blockIdx.x) * kNumbers),
        is_tapped_(place_.cluster == 0 && a.tap.ring_rows != nullptr && __ldg(a.tap.ring_rows) >= 0) {}

  __device__ void run() {
    const bool attends = place_.cluster < a_.kv_heads;
    columns_.ask_for(a_.layers[0].attention_norm);
    if (attends) columns_.send_to(kQkv);
    for (int l = 0; l < a_.num_layers; ++l) {
      const Layer& layer = a_.layers[l];
      const bool is_last = l + 1 == a_.num_layers;
      const BFloat16 *const gains = layer.mlp_norm, *const next_gains =
                                                        a_.layers[is_last ? l : l + 1].attention_norm;
      if (is_tapped_) tap(layer.index);
      const uint32_t parity = l % 2, number = numbers_ + l + 1;
      if (attends) {
        project(parity);
        Fragments tile;
        attention_.attend(layer, tiles_, parity, [&] { tile.load(tiles_.await() + rows_first_); });
        add_output(number, tile);
      }
      columns_.ask_for(gains);
      columns_.add_parts(kOutput, number, a_.kv_heads);
      columns_.send_to(kGate);
      make_inner(parity);
      add_down(parity, number);
      columns_.ask_for(next_gains);
      columns_.add_parts(kDown, number, a_.num_clusters);
      if (attends && !is_last) columns_.send_to(kQkv);
    }
    if (place_.cluster == 0) columns_.store_residual(a_.residual);
  }

 private:
  // Rarely: somebody wants the hidden states of this token.
  __device__ __forceinline__ void tap(int layer) const {
    HiddenTap at = a_.tap;
    at.layer = layer;
    if (BFloat16* const row = tap_row<BFloat16>(at, 0, 1024 * A)) columns_.store_residual(row);
  }

  __device__ __forceinline__ void project(uint32_t parity) {
    const float factor =
        multiply_hidden(shared_, tiles_, kQkv, a_.group + 2, parity, a_.eps, warp_, lane_, rows_first_);
    constexpr int kPairs = kTileRows / 2;
    for (int i = lane_; i < (a_.group + 2) * kPairs; i += kWarp) {
      const float2 sums = sum_parts(shared_, kQkv, 2 * i);
      send(&shared_.rows[i / kPairs][place_.rank * kPairs + i % kPairs], shared_.rows_there, warp_,
           pack(sums.x * factor, sums.y * factor));
    }
  }

  // `tile`: the first one
  __device__ __forceinline__ void add_output(uint32_t number, Fragments& tile) {
#pragma unroll
    for (int i = 0; i < A; ++i) {
      TileSums sums{};
      for (int t = 0; t < a_.group; ++t) {
        uint32_t x[16];
        load_pairs(x, shared_.attended[t], lane_);
        if (i + t > 0) tile.load(tiles_.await() + rows_first_);
        multiply(sums, tile, x);
        tiles_.give_back(lane_);
      }
      columns_.leave(kOutput, number, i, sums);
    }
  }

  __device__ __forceinline__ void make_inner(uint32_t parity) {
    const int units = units_;
    const float factor =
        multiply_hidden(shared_, tiles_, kGate, units, parity, a_.eps, warp_, lane_, rows_first_);
    constexpr int kPairs = kUnit / 2;
    for (int i = lane_; i < units * kPairs; i += kWarp) {
      const int row = i / kPairs * kTileRows + i % kPairs * 2, pair = place_.rank * units * kPairs + i;
      const float2 gates = sum_parts(shared_, kGate, row), ups = sum_parts(shared_, kGate, row + kUnit);
      const float low = gate(a_.activation, gates.x * factor, ups.x * factor);
      const float high = gate(a_.activation, gates.y * factor, ups.y * factor);
      send(&shared_.inner[pair / kTileWords][place_of_pair(pair % kTileWords)], shared_.inner_there, warp_,
           pack(low, high));
    }
  }

  __device__ __forceinline__ void add_down(uint32_t parity, uint32_t number) {
    const int units = units_;
    Fragments tile;
    if (units > 1) tile.load(tiles_.await() + rows_first_);
    shared_.inner_there.wait(parity);
#pragma unroll
    for (int i = 0; i < A; ++i) {
      TileSums sums{};
      uint32_t x[16];
      for (int t = 0; t < units / 2; ++t) {
        load_pairs(x, shared_.inner[t], lane_);
        if (i + t > 0) tile.load(tiles_.await() + rows_first_);
        multiply(sums, tile, x);
        tiles_.give_back(lane_);
      }
      if (units % 2) {
        load_pairs(x, shared_.inner[units / 2], lane_);
        tile.load<4>(tiles_.await() + rows_first_);
        multiply<4>(sums, tile, x);
        tiles_.give_back(lane_);
      }
      columns_.leave(kDown, number, i, sums);
    }
    if (threadIdx.x == 0) shared_.inner_there.arrive_expecting(inner_bytes(units));
  }

 public:
  __device__ static uint32_t inner_bytes(int units) { return kCluster * units * kUnit * 2; }

 private:
  const Arguments& a_;
  Shared<A>& shared_;
  const Place place_;
  Tiles tiles_;
  HeadAttention<A> attention_;
  Columns<A> columns_;
  const int warp_, lane_, units_;
  const uint32_t rows_first_;
  const uint32_t numbers_;
  const bool is_tapped_;
};

template <int A>
__device__ void make_barriers(const Arguments& a, Shared<A>& shared) {
  for (int w = 0; w < kWarps; ++w)
    for (int s = 0; s < kSlots; ++s) {
      shared.full[w][s].init(1);
      shared.empty[w][s].init(1);
    }
  for (int reader = 0; reader < 2; ++reader) {
    for (int r = 0; r < kCluster; ++r) shared.x_there[reader][r].init(1);
  }
  shared.rows_there.init(1);
  shared.states_there.init(1);
  shared.inner_there.init(1);
  publish_barriers();
  for (int reader = 0; reader < 2; ++reader) {
    for (int r = 0; r < kCluster; ++r) shared.x_there[reader][r].arrive_expecting(kSliceBytes<A>);
  }
  shared.rows_there.arrive_expecting((a.group + 2) * kTileWords * 4);
  shared.states_there.arrive_expecting(HeadAttention<A>::states_bytes(a.group));
  shared.inner_there.arrive_expecting(Worker<A>::inner_bytes(a.shares[Place().cluster].count));
}

template <int A>
__global__ void __launch_bounds__(kThreads, 1) row_stack_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared<A>*>(memory + kRingBytes);
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  if (threadIdx.x == 0) make_barriers(a, shared);
  __syncthreads();
  publish_in_cluster();  // before a block sends, all have begun
  const uint32_t ring = shared_address(memory) + warp % kWarps * kSlots * kTileBytes;
  if (!a.early) wait_for_previous();
  if (warp < kWarps) {
    if constexpr (kIsHopper) grow_registers<kConsumerRegisters>();
    if (a.early) wait_for_previous();
    await_published();
    Worker<A>(a, shared, ring, warp, lane).run();
  } else {
    if constexpr (kIsHopper) shrink_registers<kFeederRegisters>();
    if (lane == 0) Feeder<A>(a, shared, ring, warp - kWarps).run();
    __syncwarp();
    await_published();
  }
  let_next_start();
  publish_in_cluster();  // nobody leaves while others write to it
  await_published();
  if (threadIdx.x == 0) ++a.launches[blockIdx.x];
}

// Tiles of bfloat16 in the order that load_matrices wants.
CUtensorMap map_of(const void* data, const cuuint64_t (&sizes)[4], const cuuint64_t (&strides)[3],
                   const cuuint32_t (&box)[4]) {
  const cuuint32_t steps[] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      tensor_map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(data), sizes, strides,
                           box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, kLineFetch,
                           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS, "the driver refused the tensor map of a stack");
  return map;
}

CUtensorMap tile_map(const void* data, cuuint64_t rows, cuuint64_t halves, cuuint64_t columns,
                     cuuint32_t panels) {
  return map_of(
      data, {kPanelColumns, rows, halves, columns / kPanelColumns},
      {columns * 2, rows * columns * 2, kPanelColumns * 2},
      {kPanelColumns, kTileRows / static_cast<cuuint32_t>(halves), static_cast<cuuint32_t>(halves), panels});
}

// Heads as tiles: of [64, BS, D / 64, heads].
CUtensorMap cache_map(const void* data, const KvLayout& layout) {
  const auto d = static_cast<cuuint64_t>(layout.head_dim), bs = static_cast<cuuint64_t>(layout.block_size);
  const auto heads = static_cast<cuuint64_t>(layout.head_index(layout.num_blocks, 0, 0));
  const cuuint64_t panels = d / kPanelColumns;
  return map_of(data, {kPanelColumns, bs, panels, heads}, {d * 2, kPanelColumns * 2, bs * d * 2},
                {kPanelColumns, kTileRows, static_cast<cuuint32_t>(panels), 1});
}

template <int A>
LaunchShape launch_shape(int clusters) {
  return {.grid = static_cast<unsigned>(clusters * kCluster),
          .block = kThreads,
          .shared_bytes = kRingBytes + sizeof(Shared<A>),
          .cluster = kCluster,
          .overlaps_previous = true};
}

// Counters and words are those of all stacks of a device, so all have as many clusters: those that find room
// at once.
int num_clusters() {
  static const int num = std::min({clusters_at_once(row_stack_kernel<1>, launch_shape<1>(1)),
                                   clusters_at_once(row_stack_kernel<2>, launch_shape<2>(1)), kMostClusters});
  return num;
}
static_assert(kRingBytes + sizeof(Shared<2>) <= 227 * 1024);

// Gives each cluster its units, one at least, so that the one with most to multiply has as little as can be.
// Of what clusters with heads multiply, qkv counts: others wait meanwhile. Returns whether there are enough.
bool share_out(const RowStackShape& shape, int clusters, Share (&shares)[kMostClusters]) {
  const int heads = static_cast<int>(shape.kv_heads), group = static_cast<int>(shape.q_heads) / heads;
  const int units = static_cast<int>(shape.inner / (kCluster * kUnit));  // of a cluster's blocks, one of each
  int counts[kMostClusters] = {};
  std::fill_n(counts, clusters, 1);
  // In halves of tiles: a unit is one of gate and up, and half a tile of down.
  const auto cost = [&](int c) { return (c < heads ? 2 * (group + 2) : 0) + 3 * counts[c]; };
  for (int left = units - clusters; left > 0; --left) {
    int best = 0;
    for (int c = 1; c < clusters; ++c)
      if (counts[best] == kMostUnits || (counts[c] < kMostUnits && cost(c) < cost(best))) best = c;
    ++counts[best];
  }
  for (int c = 0, first = 0; c < clusters; first += kCluster * counts[c++]) shares[c] = {first, counts[c]};
  return units >= clusters && *std::max_element(counts, counts + clusters) <= kMostUnits;
}

// Over how many clocks the tiles of a layer are asked for. All that rings have room for at once would keep
// what blocks tell each other waiting; so they are asked for evenly, in four fifths of what a layer takes.
int layer_clocks(const RowStackShape& s) {
  constexpr int64_t kExchangeClocks = 17000;  // of a layer whose weights are there
  constexpr int64_t kBytesPerClock = 2450;    // that memory brings
  const int64_t attended = s.q_heads * s.head_dim, qkv = attended + 2 * s.kv_heads * s.head_dim;
  const int64_t bytes = 2 * s.hidden * (qkv + attended + 3 * s.inner);
  return static_cast<int>(std::max(kExchangeClocks, bytes / kBytesPerClock) * 4 / 5);
}

}  // namespace stack

using namespace stack;

bool can_stack_row(const RowStackShape& s) {
  if (!is_hopper() || (s.hidden != 1024 && s.hidden != 2048) || s.head_dim != kHead) return false;
  if (s.kv_heads < 1 || s.q_heads % s.kv_heads || s.q_heads / s.kv_heads > kMostGroup) return false;
  const int clusters = num_clusters();
  if (s.kv_heads > clusters || s.inner % (kCluster * kUnit)) return false;
  Share shares[kMostClusters]{};
  return share_out(s, clusters, shares);
}

size_t row_stack_table_bytes(int64_t num_layers) { return num_layers * sizeof(Layer); }

void write_row_stack_table(const RowStackShape& s, const RowStackLayer* layers, int64_t num_layers,
                           void* table) {
  check(can_stack_row(s), "a stack without a kernel");
  check(num_layers > 0 && num_layers < kNumbers, "a stack of so many layers");
  constexpr int64_t kMostTapped = 128;
  const auto h = static_cast<cuuint64_t>(s.hidden), i = static_cast<cuuint64_t>(s.inner);
  const auto a = static_cast<cuuint64_t>(s.q_heads * s.head_dim);
  const cuuint64_t q = a + 2 * static_cast<cuuint64_t>(s.kv_heads * s.head_dim);
  for (int64_t l = 0; l < num_layers; ++l) {
    const RowStackLayer& from = layers[l];
    const auto norm = [](const void* weight) { return static_cast<const BFloat16*>(weight); };
    check(from.index >= 0 && from.index < kMostTapped, "a layer beyond those that taps know");
    const Layer layer = {.qkv = tile_map(from.qkv, q, 1, h, 2),
                         .output = tile_map(from.output, h, 1, a, 2),
                         .gate_up = tile_map(from.gate_up, i, 2, h, 2),
                         .down = tile_map(from.down, h, 1, i, 2),
                         .down_panel = tile_map(from.down, h, 1, i, 1),
                         .attention_norm = norm(from.attention_norm),
                         .mlp_norm = norm(from.mlp_norm),
                         .q_norm = norm(from.q_norm),
                         .k_norm = norm(from.k_norm),
                         .cache_layer = from.cache_layer,
                         .index = static_cast<int32_t>(from.index)};
    std::memcpy(static_cast<std::byte*>(table) + l * sizeof(Layer), &layer, sizeof layer);
  }
}

void row_stack(const RowStackParams& p, Stream stream) {
  const RowStackShape& s = p.shape;
  const int clusters = num_clusters();
  check(can_stack_row(s) && p.num_layers > 0 && p.num_layers < kNumbers, "a stack without a kernel");
  check(p.layout.head_dim == s.head_dim && p.layout.num_kv_heads == s.kv_heads, "a cache of other heads");
  check(p.layout.block_size % kTileRows == 0, "blocks that are not whole tiles of keys");
  check(is_aligned(p.table, alignof(Layer)), "a table that is not aligned");
  static_assert(4 * kMostClusters * 2048 * sizeof(uint2) + 1024 <= kRowStackScratchBytes);
  Arguments a{.cache = cache_map(p.kv_cache, p.layout),
              .layers = static_cast<const Layer*>(p.table),
              .num_layers = static_cast<int>(p.num_layers),
              .num_clusters = clusters,
              .q_heads = static_cast<int>(s.q_heads),
              .kv_heads = static_cast<int>(s.kv_heads),
              .group = static_cast<int>(s.q_heads / s.kv_heads),
              .shares = {},
              .eps = p.eps,
              .head_eps = p.head_eps,
              .score_factor = p.scale * static_cast<float>(M_LOG2E),
              .activation = p.activation,
              .layer_clocks = layer_clocks(s),
              .early = is_captured(stream),
              .cos_sin = p.cos_sin,
              .kv_cache = static_cast<BFloat16*>(p.kv_cache),
              .layout = p.layout,
              .position = p.position,
              .slot = p.slot,
              .block_table = p.block_table,
              .num_items = p.num_items,
              .residual = static_cast<BFloat16*>(p.residual),
              .tap = p.tap,
              .words = static_cast<uint2*>(p.scratch),
              .launches = static_cast<uint32_t*>(p.scratch) + 4 * kMostClusters * 2048 * 2};
  share_out(s, clusters, a.shares);
  if (s.hidden == 1024)
    launch(row_stack_kernel<1>, launch_shape<1>(clusters), stream, a);
  else
    launch(row_stack_kernel<2>, launch_shape<2>(clusters), stream, a);
}

}  // namespace bequest::cuda
