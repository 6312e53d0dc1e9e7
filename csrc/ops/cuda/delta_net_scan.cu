// Many tokens of a sequence, in three kernels. What does not depend on S is made of all tokens at once: the
// convolution with its norms and gates before, the norm of results and its gate behind. Between them S takes
// one token after another.
//
// A column of S needs no other one, so a block has a quarter of a head's. Eight lanes have a column, sixteen
// keys each, and meet by shuffles. Tokens come to shared memory in stages of eight; nobody waits for anybody
// within a stage.
#include <algorithm>

#include "device/copies.cuh"
#include "device/launch.cuh"
#include "device/shared_memory.cuh"
#include "ops/cuda/delta_net_kernels.h"
#include "ops/cuda/delta_net_parts.cuh"

namespace bequest::cuda::delta {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kColumns = kThreads / kParts;  // of a block that scans
constexpr int kStageTokens = 8;
constexpr int kPreparedTokens = 8;          // of a block that prepares
constexpr int64_t kMostScannedAtOnce = 64;  // sequences; further ones come in turn

// What the kernels leave for each other.
struct Scratch {
  float* rows;   // [T, C]: queries, keys and values as S meets them; then results in place of values
  Gates* gates;  // [T, HV]

  __device__ explicit Scratch(const DeltaNetParams& p)
      : rows(p.scratch),
        gates(reinterpret_cast<Gates*>(p.scratch + p.num_tokens * p.sizes.conv_channels())) {}
};
static_assert(sizeof(Gates) == 2 * sizeof(float));

// The sequence of a token, by all threads of a block; -1: it is padding.
__device__ int64_t sequence_of(const DeltaNetParams& p, int64_t token) {
  __shared__ int found;
  if (threadIdx.x == 0) found = -1;
  __syncthreads();
  for (int64_t s = threadIdx.x; s < p.num_sequences; s += blockDim.x)
    if (p.query_start[s] <= token && token < p.query_start[s + 1]) found = static_cast<int>(s);
  __syncthreads();
  return found;
}

// A warp has 128 channels, which are a query, a key or a value.
template <class T>
__global__ __launch_bounds__(kThreads) void delta_prepare_kernel(const DeltaNetParams p) {
  let_next_start();
  wait_for_previous();
  const DeltaNetSizes& n = p.sizes;
  const Scratch scratch(p);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t first = int64_t{blockIdx.x} * kPreparedTokens, vector = int64_t{blockIdx.y} * kWarps + warp;
  int64_t sequence = sequence_of(p, first);
  if (sequence < 0 || vector >= 2 * n.key_heads + n.value_heads) return;
  const int64_t channel = vector * kDim + lane * kQuad;
  const int64_t end = min(first + kPreparedTokens, int64_t{p.query_start[p.num_sequences]});
  float taps[kWidth][kQuad];
  load_taps(p, channel, taps);
  for (int64_t t = first; t < end; ++t) {
    while (t >= p.query_start[sequence + 1]) ++sequence;
    const Past past = Past::of(p, sequence);
    const T* const row = static_cast<const T*>(p.rows) + t * n.row_size();
    Window window;
    window.load_past(past, t - past.begin, n.conv_channels(), channel);
    window.load_rows(row, t - past.begin, n.row_size(), channel);
    float y[kQuad];
    window.convolve(taps, y);
    if (vector < 2 * n.key_heads) scale_to(vector < n.key_heads ? kQueryLength : 1.0f, y);
    store_vector<float, kQuad>(scratch.rows + t * n.conv_channels() + channel, y);
    if (p.slots[t] >= 0) window.keep(p, p.slots[t], channel);
    if (vector < n.key_heads)  // some warps make the gates, too
      for (int64_t head = vector * kWarp + lane; head < n.value_heads; head += n.key_heads * kWarp)
        scratch.gates[t * n.value_heads + head] =
            Gates::of(widen(row[gates_at(n) + n.value_heads + head]), widen(row[gates_at(n) + head]),
                      p.decay[head], p.step_bias[head]);
  }
}

// Of a few tokens.
struct alignas(16) Stage {
  float query[kStageTokens][kDim], key[kStageTokens][kDim], value[kStageTokens][kColumns];
  Gates gates[kStageTokens];
  int slots[kStageTokens];
};

// A block's place in the scratch: a quarter of a value head.
struct Quarter {
  const DeltaNetParams& p;
  int head, column;       // the first of its columns
  int query, key, value;  // where they begin in a row
  int64_t pitch;          // of rows

  __device__ explicit Quarter(const DeltaNetParams& p)
      : p(p),
        head(static_cast<int>(blockIdx.x) / (kDim / kColumns)),
        column(static_cast<int>(blockIdx.x) % (kDim / kColumns) * kColumns),
        query(head / static_cast<int>(p.sizes.value_heads / p.sizes.key_heads) * kDim),
        key(static_cast<int>(p.sizes.key_size()) + query),
        value(static_cast<int>(2 * p.sizes.key_size()) + head * kDim + column),
        pitch(p.sizes.conv_channels()) {}

  __device__ __forceinline__ float* row(int64_t t) const { return p.scratch + t * pitch; }

  // Asks for tokens from `first` on, by all threads: a warp has a token.
  __device__ __forceinline__ void ask(Stage& stage, int64_t first, int count) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, t = static_cast<int>(threadIdx.x) / kWarp;
    if (t < count) {
      const float* const from = row(first + t);
      copy_16_async(shared_address(stage.query[t] + lane * kQuad), from + query + lane * kQuad, true);
      copy_16_async(shared_address(stage.key[t] + lane * kQuad), from + key + lane * kQuad, true);
      if (lane < kColumns / kQuad)
        copy_16_async(shared_address(stage.value[t] + lane * kQuad), from + value + lane * kQuad, true);
      if (lane == 0) {
        const Gates* const gates = Scratch(p).gates + (first + t) * p.sizes.value_heads + head;
        copy_4_async(shared_address(&stage.gates[t].decay), &gates->decay);
        copy_4_async(shared_address(&stage.gates[t].rate), &gates->rate);
        copy_4_async(shared_address(&stage.slots[t]), p.slots + first + t);
      }
    }
    commit_copies();
  }
};
static_assert(kWarps == kStageTokens);

// A lane's keys of a column.
struct Column {
  float of[kRounds][kQuad];

  __device__ __forceinline__ Column(const float* from, int part) {
#pragma unroll
    for (int r = 0; r < kRounds; ++r)
#pragma unroll
      for (int k = 0; k < kQuad; ++k) of[r][k] = from == nullptr ? 0.0f : from[(key_of(part, r) + k) * kDim];
  }

  __device__ __forceinline__ void keep(float* to, int part) const {
#pragma unroll
    for (int r = 0; r < kRounds; ++r)
#pragma unroll
      for (int k = 0; k < kQuad; ++k) to[(key_of(part, r) + k) * kDim] = of[r][k];
  }

  // Sums over all keys, in all lanes of the column.
  __device__ __forceinline__ static float joined(const float (&sums)[kRounds]) {
    float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
#pragma unroll
    for (int distance = 1; distance < kParts; distance *= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
    return sum;
  }

  // What it gives for the token's query.
  __device__ __forceinline__ float pass(const Stage& stage, int t, int column, int part) {
    float key[kRounds][kQuad], sums[kRounds] = {};
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      load_vector<float, kQuad>(stage.key[t] + key_of(part, r), key[r]);
#pragma unroll
      for (int k = 0; k < kQuad; ++k) sums[r] = fmaf(of[r][k], key[r][k], sums[r]);
    }
    const Gates gates = stage.gates[t];
    const float change = change_of(gates, stage.value[t][column], joined(sums));
    float results[kRounds] = {};
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      float query[kQuad];
      load_vector<float, kQuad>(stage.query[t] + key_of(part, r), query);
#pragma unroll
      for (int k = 0; k < kQuad; ++k) {
        of[r][k] = fmaf(change, key[r][k], of[r][k] * gates.decay);
        results[r] = fmaf(of[r][k], query[k], results[r]);
      }
    }
    return joined(results);
  }
};
static_assert(kRounds == 4 && kParts == 8);

// The tokens of a whole stage, of which nobody wants a state: without branches, so that what follows one
// token runs beside the next. results: where those of its first token go
__device__ __forceinline__ void pass_stage(Column& held, const Stage& stage, int column, int part,
                                           float* results, int64_t pitch) {
  float result[kStageTokens];
#pragma unroll
  for (int t = 0; t < kStageTokens; ++t) result[t] = held.pass(stage, t, column, part);
  if (part != 0) return;
#pragma unroll
  for (int t = 0; t < kStageTokens; ++t) results[t * pitch + column] = result[t];
}

// One sequence, by all threads of a block.
__device__ __forceinline__ void scan(const Quarter& quarter, int64_t begin, int64_t end, int64_t start,
                                     Stage (&stages)[2]) {
  const DeltaNetParams& p = quarter.p;
  const int thread = static_cast<int>(threadIdx.x), column = thread / kParts, part = thread % kParts;
  float* const place = p.states + quarter.head * kDim * kDim + quarter.column + column;
  const auto stage_len = [&](int64_t first) {
    return static_cast<int>(min(int64_t{kStageTokens}, end - first));
  };
  quarter.ask(stages[0], begin, stage_len(begin));
  Column held(start < 0 ? nullptr : place + start * p.slot_stride, part);
  int now = 0;
#pragma unroll 1
  for (int64_t first = begin; first < end; first += kStageTokens, now ^= 1) {
    wait_copies<0>();
    __syncthreads();  // all have come, and nobody reads the other stage any more
    const int64_t next = first + kStageTokens;
    if (next < end) quarter.ask(stages[now ^ 1], next, stage_len(next));
    const Stage& stage = stages[now];
    const int count = stage_len(first), lane = thread % kWarp;
    float* const results = quarter.row(first) + quarter.value;
    const bool wanted = __any_sync(kAllLanes, lane < count && stage.slots[lane % kStageTokens] >= 0);
    if (count == kStageTokens && !wanted) {
      pass_stage(held, stage, column, part, results, quarter.pitch);
      continue;
    }
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
      const float result = held.pass(stage, t, column, part);
      if (part == 0) results[t * quarter.pitch + column] = result;
      if (stage.slots[t] >= 0) held.keep(place + stage.slots[t] * p.slot_stride, part);
    }
  }
  __syncthreads();
}

__global__ __launch_bounds__(kThreads) void delta_scan_kernel(const DeltaNetParams p) {
  __shared__ Stage stages[2];
  let_next_start();
  wait_for_previous();
  const Quarter quarter(p);
  for (int64_t s = blockIdx.y; s < p.num_sequences; s += gridDim.y) {
    const int64_t begin = p.query_start[s], end = p.query_start[s + 1];
    if (begin < end) scan(quarter, begin, end, p.starts[s], stages);
  }
}

// A warp has the results of a token and a head. Rows behind the last token become zeros.
template <class T>
__global__ __launch_bounds__(kThreads) void delta_finish_kernel(const DeltaNetParams p) {
  let_next_start();
  const DeltaNetSizes& n = p.sizes;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  const int64_t t = i / n.value_heads, place = i % n.value_heads * kDim + lane * kQuad;
  float weight[kQuad];
  load_constant<float, kQuad>(p.norm + lane * kQuad, weight);
  wait_for_previous();
  if (t >= p.num_tokens) return;
  float o[kQuad] = {};
  if (t < p.query_start[p.num_sequences]) {
    float z[kQuad];
    load_vector<T, kQuad>(static_cast<const T*>(p.rows) + t * n.row_size() + n.conv_channels() + place, z);
    load_vector<float, kQuad>(p.scratch + t * n.conv_channels() + 2 * n.key_size() + place, o);
    finish(weight, z, p.eps, o);
  }
  store_vector<T, kQuad>(static_cast<T*>(p.out) + t * n.value_size() + place, o);
}

}  // namespace

void delta_scan(const DeltaNetParams& p, Stream stream) {
  const DeltaNetSizes& n = p.sizes;
  const auto launch_over = [&](auto kernel, int64_t x, int64_t y) {
    launch(kernel,
           {.grid = dim3(static_cast<unsigned>(x), static_cast<unsigned>(y)),
            .block = kThreads,
            .overlaps_previous = true},
           stream, p);
  };
  dispatch(p.dtype, [&]<class T>() {
    launch_over(delta_prepare_kernel<T>, ceil_div(p.num_tokens, kPreparedTokens),
                ceil_div(2 * n.key_heads + n.value_heads, kWarps));
    launch_over(delta_scan_kernel, n.value_heads * (kDim / kColumns),
                std::min(p.num_sequences, kMostScannedAtOnce));
    launch_over(delta_finish_kernel<T>, ceil_div(p.num_tokens * n.value_heads, kWarps), 1);
  });
}

}  // namespace bequest::cuda::delta
