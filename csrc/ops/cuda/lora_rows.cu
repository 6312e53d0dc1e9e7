// What adapters add in float32, and to matrices of odd sizes: a warp has a sum of A's depth, a thread an
// output. For models that are served for exactness, and for routers and gates, not for speed.
#include "device/vectors.cuh"
#include "ops/cuda/lora_work.cuh"

namespace bequest::cuda {
namespace lora {
namespace {

constexpr int kRowThreads = 256;
constexpr int kRowWarps = kRowThreads / kWarp;

// Tiles that are there; whoever calls has waited for them where they are made in the step.
__device__ __forceinline__ bool exists(const LoraTiles& tiles) {
  return static_cast<int>(blockIdx.x) < num_tiles(tiles);
}

template <class T>
__global__ __launch_bounds__(kRowThreads) void shrink_rows_kernel(const __grid_constant__ LoraAddParams p) {
  let_next_start();
  wait_for_previous();
  if (!exists(p.tiles)) return;
  const LoraSite& site = p.site;
  const Tile tile = tile_of(p.tiles, static_cast<int>(blockIdx.x));
  const int part = static_cast<int>(blockIdx.y), rank = rank_of(site, tile.slot, part);
  if (rank == 0) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t index = int64_t{tile.slot} * site.num_parts + part, depth = site.in_features;
  const T* const a = static_cast<const T*>(site.a) + index * site.most_rank * depth;
  const float scale = __ldg(site.scales + index);
  for (int i = static_cast<int>(threadIdx.x) / kWarp; i < tile.count * rank; i += kRowWarps) {
    const int at = tile.first + i / rank, of = i % rank;
    const int64_t row = __ldg(p.tiles.rows + at) / p.tiles.rows_of_x;
    const T* const x = static_cast<const T*>(p.x) + row * depth;
    float sum = 0;
    for (int64_t k = lane; k < depth; k += kWarp) sum = fmaf(widen(x[k]), widen(a[of * depth + k]), sum);
    sum = warp_sum(sum);
    if (lane == 0)
      p.shrunk[at * (site.num_parts * site.most_rank) + part * site.most_rank + of] = sum * scale;
  }
}

template <class T>
__global__ __launch_bounds__(kRowThreads) void expand_rows_kernel(const __grid_constant__ LoraAddParams p) {
  let_next_start();
  wait_for_previous();
  const LoraSite& site = p.site;
  const int64_t column = int64_t{blockIdx.y} * kRowThreads + threadIdx.x;
  if (!exists(p.tiles) || column >= site.out_features) return;
  const Tile tile = tile_of(p.tiles, static_cast<int>(blockIdx.x));
  int part = 0;
  while (column >= site.ends[part]) ++part;
  const int rank = rank_of(site, tile.slot, part);
  if (rank == 0) return;
  const T* const b = static_cast<const T*>(site.b) +
                     (tile.slot * (site.most_rank / kLoraRanks) * site.out_features + column) * kLoraRanks;
  const int64_t width = site.num_parts * site.most_rank;
  for (int i = 0; i < tile.count; ++i) {
    const float* const shrunk = p.shrunk + (tile.first + i) * width + part * site.most_rank;
    float sum = 0;
    for (int r = 0; r < rank; ++r)
      sum = fmaf(rounded<T>(shrunk[r]),
                 widen(b[r / kLoraRanks * site.out_features * kLoraRanks + r % kLoraRanks]), sum);
    T* const y = static_cast<T*>(p.y) + __ldg(p.tiles.rows + tile.first + i) * site.out_features + column;
    *y = narrow<T>(widen(*y) + sum);
  }
}

LaunchShape shape_of(const LoraTiles& tiles, int64_t others) {
  return {.grid = {static_cast<unsigned>(tiles.most_tiles), static_cast<unsigned>(others)},
          .block = kRowThreads,
          .overlaps_previous = true};
}

}  // namespace

void shrink_rows(const LoraAddParams& p, Stream stream) {
  dispatch(p.site.dtype,
           [&]<class T>() { launch(shrink_rows_kernel<T>, shape_of(p.tiles, p.site.num_parts), stream, p); });
}

void expand_rows(const LoraAddParams& p, Stream stream) {
  dispatch(p.site.dtype, [&]<class T>() {
    launch(expand_rows_kernel<T>, shape_of(p.tiles, ceil_div(p.site.out_features, kRowThreads)), stream, p);
  });
}

}  // namespace lora
}  // namespace bequest::cuda
