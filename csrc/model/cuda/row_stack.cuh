// The sizes of row_stack.cu, its arguments and its shared memory.
//
// Multiprocessors are clusters of eight, whose blocks write to each other's shared memory. A cluster is what
// a process is to tensor parallelism: it has a key head with its queries, the columns of the output product
// that read them, and some inner columns of the feed-forward layer. So all that it makes of a row stays in
// the cluster, and only sums over clusters, two of a layer, go by way of the L2. Clusters without heads have
// more inner columns.
//
// Within a cluster block r has the r-th part of the hidden columns, and warp w of it the w-th part of those:
// it adds up these columns, keeps their residual, and sends what the next product reads of them to all
// blocks of its cluster. In products over hidden columns warp w multiplies the part that block w has sent;
// in products to hidden columns it has the rows of W that make its own.
//
// It cannot hang: a block waits for others of its grid, all of which are on the chip at once or come there
// when other kernels have ended, which wait for none of this. Two such grids at once, of two processes on one
// GPU, could each have a part of the chip; waits then end in a trap, as those of the chain do.
#pragma once

#include <cuda.h>

#include "core/dtype.h"
#include "device/barriers.cuh"
#include "device/reductions.cuh"
#include "device/warpgroup.cuh"
#include "model/cuda/row_stack.h"

namespace bequest::cuda::stack {

inline constexpr int kCluster = 8;  // blocks
inline constexpr int kMostClusters = 16;
inline constexpr int kWarps = 8;  // that multiply, and as many that ask for what they multiply
static_assert(kWarps == kCluster, "a warp multiplies what one block has sent");
inline constexpr int kConsumers = kWarps * kWarp;
inline constexpr int kThreads = 2 * kConsumers;

// A tile is 16 rows of W by 128 of k, or 16 keys or values, as two panels (device/warpgroup.cuh).
inline constexpr int kTileRows = 16;
inline constexpr int kTileColumns = 128;
inline constexpr int kPanelBytes = kTileRows * kPanelRowBytes;
inline constexpr int kTileBytes = 2 * kPanelBytes;
inline constexpr int kSlots = 6;  // tiles of a warp
inline constexpr int kRingBytes = kWarps * kSlots * kTileBytes;

inline constexpr int kHead = 128;  // values
inline constexpr int kMostGroup = 2;
inline constexpr int kUnit = 8;        // inner columns: a tile is the gate's rows of them, and those of up
inline constexpr int kMostUnits = 12;  // of a block
inline constexpr int kTileWords = kTileColumns / 2;
// Keys of all tiles that a cluster reads at once.
inline constexpr int kRoundTiles = kCluster * kWarps;

// A layer in the table.
struct alignas(128) Layer {
  CUtensorMap qkv, output, gate_up, down, down_panel;
  const BFloat16 *attention_norm, *mlp_norm, *q_norm, *k_norm;
  int64_t cache_layer;
  int32_t index;
};

struct Share {
  int first, count;  // units of a cluster's first block, and of each block
};

struct Arguments {
  CUtensorMap cache;  // keys and values as tiles
  const Layer* layers;
  int num_layers, num_clusters;
  int q_heads, kv_heads, group;
  Share shares[kMostClusters];
  float eps, head_eps;
  float score_factor;  // in powers of two
  Activation activation;
  int layer_clocks;  // that a warp takes at least to ask for its tiles of a layer
  bool early;        // what the step reads was there before the kernel ahead began
  const float* cos_sin;
  BFloat16* kv_cache;
  KvLayout layout;
  const int32_t* position;
  const int64_t* slot;
  const int32_t* block_table;
  const int32_t* num_items;
  BFloat16* residual;
  HiddenTap tap;
  uint2* words;        // [2 sums, 2, kMostClusters, H]: a float, and the number of its launch and layer
  uint32_t* launches;  // [blocks]: how many there were
};

struct Place {
  int cluster, rank;  // of this block

  __device__ Place()
      : cluster(static_cast<int>(blockIdx.x) / kCluster), rank(static_cast<int>(blockIdx.x) % kCluster) {}
};

// The tokens that a step attends to.
struct Range {
  int position;
  bool stores;
  int tiles;  // of 16 keys
  int end;    // of those in the cache

  __device__ explicit Range(const Arguments& a)
      : position(__ldg(a.position)),
        stores(__ldg(a.slot) >= 0),
        tiles(__ldg(a.num_items) > 0 ? position / kTileRows + 1 : 0),
        end(position + (stores ? 0 : 1)) {}

  // Tiles are dealt to all first warps of a cluster, then to all second ones.
  __device__ static int first_tile(int rank, int warp) { return warp * kCluster + rank; }
  __device__ int last_tile() const { return tiles - 1; }
  __device__ bool has_last(int rank) const { return tiles > 0 && last_tile() % kCluster == rank; }
};

// Numbers of layers in a launch lie in [1, kNumbers).
inline constexpr uint32_t kNumbers = 256;

// Two products of a layer read the residual.
enum Reader { kQkv, kGate };
// And two add to it.
enum Writer { kOutput, kDown };

// H = 1024 A
template <int A>
struct Shared {
  uint32_t x[2][kCluster][A * kTileWords];  // by reader and sender: pairs, see place_of_pair
  float squares[2][kCluster][kWarps];  // of the same columns' residual: sums of squares, by sender's warp
  float square_sums[2][kWarps];        // of a sender's
  uint32_t rows[kMostGroup + 2][kTileWords];        // queries, key and value as they are projected
  uint32_t queries[kMostGroup][kTileWords];         // as they meet keys
  uint32_t own[2][kTileWords];                      // key, as queries are, and value
  union {                                           // used one after another
    float sums[2][kWarps][kMostUnits * kTileRows];  // by reader: each warp's part
    float states[kWarps + 1][kMostGroup][kHead];    // of this block's warps, and of the token itself
  };
  float2 scales[kWarps + 1][kMostGroup];                // {m, d}
  float4 all_states[kCluster][kMostGroup * kHead / 4];  // of the cluster's blocks
  float2 all_scales[kCluster][kMostGroup];
  uint32_t attended[kMostGroup][kTileWords];
  uint32_t inner[kCluster * kMostUnits * kUnit / kTileColumns][kTileWords];
  PhaseBarrier full[kWarps][kSlots], empty[kWarps][kSlots];
  PhaseBarrier x_there[2][kCluster];
  PhaseBarrier rows_there, states_there, inner_there;
};

template <int A>
inline constexpr uint32_t kSliceBytes = A * kTileWords * 4 + kWarps * sizeof(float);

// Where the pair of columns 2 i, 2 i + 1 of a tile lies: a lane of a product reads 16 pairs side by side.
__host__ __device__ constexpr int place_of_pair(int i) { return i % 4 * 16 + i / 8 * 2 + i % 8 / 4; }

}  // namespace bequest::cuda::stack
