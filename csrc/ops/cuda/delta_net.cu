// Heads of any size: one block for each sequence and value head, a thread for each column of its S, which is
// worked on where it is kept. For comparisons and small models; published sizes have kernels of their own
// (delta_net_kernels.h).
#include <algorithm>

#include "device/launch.cuh"
#include "device/reductions.cuh"
#include "device/vectors.cuh"
#include "ops/cuda/activation.cuh"
#include "ops/cuda/delta_net.h"
#include "ops/cuda/delta_net_kernels.h"
#include "ops/cuda/delta_net_parts.cuh"

namespace bequest::cuda {
namespace {

constexpr int kMostThreads = 1024;

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

// A column of S, where it is kept in the end.
struct PlacedColumn {
  float* s;
  int64_t num_keys;
  int64_t stride;

  __device__ PlacedColumn(const float* from, float* to, int64_t num_keys, int64_t stride)
      : s(to), num_keys(num_keys), stride(stride) {
    if (to == nullptr) return;  // of a thread that has none
    for (int64_t k = 0; k < num_keys; ++k) s[k * stride] = from == nullptr ? 0.0f : from[k * stride];
  }

  __device__ float remembered(const float* key) const {
    float sum = 0.0f;
    for (int64_t k = 0; k < num_keys; ++k) sum = fmaf(s[k * stride], key[k], sum);
    return sum;
  }

  __device__ float change(float decay, float by, const float* key, const float* query) {
    float sum = 0.0f;
    for (int64_t k = 0; k < num_keys; ++k) {
      const float changed = fmaf(by, key[k], s[k * stride] * decay);
      s[k * stride] = changed;
      sum = fmaf(changed, query[k], sum);
    }
    return sum;
  }

  __device__ void keep(float* to, int64_t to_stride) const {
    if (to == s) return;
    for (int64_t k = 0; k < num_keys; ++k) to[k * to_stride] = s[k * stride];
  }
};

template <class T>
struct Head {
  const DeltaNetParams& p;
  const DeltaNetSizes& n;
  int64_t head, begin, start;  // begin: the first token of the sequence in the step; start: its slot, or -1

  __device__ const T* row(int64_t t) const { return static_cast<const T*>(p.rows) + t * n.row_size(); }
  __device__ float* matrix(int64_t slot) const {
    return p.states + slot * p.slot_stride + head * n.key_dim * n.value_dim;
  }
  __device__ float* inputs(int64_t slot) const { return p.states + slot * p.slot_stride + n.matrix_floats(); }

  // Where its channels begin.
  __device__ int64_t share() const { return n.value_heads / n.key_heads; }
  __device__ int64_t query_at() const { return head / share() * n.key_dim; }
  __device__ int64_t key_at() const { return n.key_size() + query_at(); }
  __device__ int64_t value_at() const { return 2 * n.key_size() + head * n.value_dim; }

  // What channel c had as its input so many tokens before token t.
  __device__ float input(int64_t t, int64_t back, int64_t c) const {
    if (t - back >= begin) return widen(row(t - back)[c]);
    if (start < 0) return 0.0f;
    return inputs(start)[(n.conv_width - 1 + t - back - begin) * n.conv_channels() + c];
  }

  __device__ float convolved(int64_t t, int64_t c) const {
    float sum = 0.0f;
    for (int64_t back = 0; back < n.conv_width; ++back)
      sum = fmaf(input(t, back, c), p.taps[(n.conv_width - 1 - back) * n.conv_channels() + c], sum);
    return delta::silu(sum);
  }

  __device__ void keep_input(int64_t t, int64_t slot, int64_t c) const {
    for (int64_t i = 0; i < n.conv_width - 1; ++i)
      inputs(slot)[i * n.conv_channels() + c] = input(t, n.conv_width - 2 - i, c);
  }

  // All threads of the block; of the heads that share a key, the first keeps that.
  __device__ void keep_inputs(int64_t t, int64_t slot) const {
    const int64_t i = threadIdx.x;
    if (i < n.value_dim) keep_input(t, slot, value_at() + i);
    if (i >= n.key_dim || head % share() != 0) return;
    keep_input(t, slot, query_at() + i);
    keep_input(t, slot, key_at() + i);
  }
};

__device__ __forceinline__ float block_sum(float x, float* shared) {
  return block_reduce(x, shared, [](float a, float b) { return a + b; });
}

// The convolution of a token and its gates, for all threads of a block.
template <class T>
struct Token {
  float* query;  // [DK], shared, as the others
  float* key;    // [DK]
  float* value;  // [DV]
  float* sums;   // [3, warps]
  float decay, rate;

  __device__ Token(const DeltaNetSizes& n, float* shared)
      : query(shared), key(query + n.key_dim), value(key + n.key_dim), sums(value + n.value_dim) {}

  // Ends with a barrier.
  __device__ void make(const Head<T>& of, int64_t t) {
    const DeltaNetSizes& n = of.n;
    const int64_t i = threadIdx.x;
    const bool has_key = i < n.key_dim;
    const float q = has_key ? of.convolved(t, of.query_at() + i) : 0.0f;
    const float k = has_key ? of.convolved(t, of.key_at() + i) : 0.0f;
    if (i < n.value_dim) value[i] = of.convolved(t, of.value_at() + i);
    const float q_square = block_sum(q * q, sums), k_square = block_sum(k * k, sums + warps());
    if (has_key) {
      query[i] = q * rsqrtf(q_square + kSmallestSquare) * rsqrtf(static_cast<float>(n.key_dim));
      key[i] = k * rsqrtf(k_square + kSmallestSquare);
    }
    const T* const gates = of.row(t) + n.conv_channels() + n.value_size();
    const float a = widen(gates[n.value_heads + of.head]) + of.p.step_bias[of.head];
    const float softplus = a > 20.0f ? a : log1pf(__expf(a));
    decay = __expf(of.p.decay[of.head] * softplus);
    rate = sigmoid(widen(gates[of.head]));
    __syncthreads();
  }

  __device__ static unsigned warps() { return blockDim.x / kWarp; }
};

// Rows behind the last token of all sequences.
template <class T>
__device__ void clear_padding(const DeltaNetParams& p) {
  const int64_t used = p.query_start[p.num_sequences], size = p.sizes.value_dim;
  if (threadIdx.x >= size) return;
  for (int64_t t = blockIdx.y; t < p.num_tokens; t += gridDim.y)
    if (t >= used)
      static_cast<T*>(p.out)[t * p.sizes.value_size() + blockIdx.x * size + threadIdx.x] = narrow<T>(0.0f);
}

template <class T>
__global__ void delta_net_kernel(const DeltaNetParams p) {
  extern __shared__ float shared[];
  let_next_start();
  wait_for_previous();
  clear_padding<T>(p);
  const DeltaNetSizes& n = p.sizes;
  const int64_t begin = p.query_start[blockIdx.y], end = p.query_start[blockIdx.y + 1];
  if (begin == end) return;
  const Head<T> of{p, n, int64_t{blockIdx.x}, begin, p.starts[blockIdx.y]};
  Token<T> token(n, shared);
  const int64_t own = threadIdx.x;
  const bool has_column = own < n.value_dim;
  // Threads beyond the columns read the last one, and write nothing.
  const int64_t column = has_column ? own : n.value_dim - 1, last = p.slots[end - 1];
  PlacedColumn state(of.start < 0 ? nullptr : of.matrix(of.start) + column,
                     last < 0 || !has_column ? nullptr : of.matrix(last) + column, n.key_dim, n.value_dim);
  const float weight = p.norm[column];
  const int64_t place = of.head * n.value_dim + column;
  for (int64_t t = begin; t < end; ++t) {
    token.make(of, t);
    float o = 0.0f;
    if (has_column) {
      const float by = (token.value[column] - token.decay * state.remembered(token.key)) * token.rate;
      o = state.change(token.decay, by, token.key, token.query);
    }
    const float squares = block_sum(has_column ? o * o : 0.0f, token.sums + 2 * token.warps());
    if (has_column) {
      const float z = widen(of.row(t)[n.conv_channels() + place]);
      const float scale = rsqrtf(squares / static_cast<float>(n.value_dim) + p.eps);
      static_cast<T*>(p.out)[t * n.value_size() + place] = narrow<T>(weight * (o * scale) * delta::silu(z));
    }
    if (p.slots[t] < 0) continue;
    if (has_column) state.keep(of.matrix(p.slots[t]) + column, n.value_dim);
    of.keep_inputs(t, p.slots[t]);
  }
}

template <class T, int W>
__global__ void sigmoid_gate_kernel(T* x, const T* gate, int64_t count) {
  let_next_start();
  wait_for_previous();
  const int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * W;
  if (i >= count) return;
  float a[W], b[W];
  load_vector<T, W>(x + i, a);
  load_vector<T, W>(gate + i, b);
#pragma unroll
  for (int j = 0; j < W; ++j) a[j] *= sigmoid(b[j]);
  store_vector<T, W>(x + i, a);
}

template <class T>
void launch_columns(const DeltaNetParams& p, Stream stream) {
  const DeltaNetSizes& n = p.sizes;
  const int64_t threads = round_up(std::max(n.key_dim, n.value_dim), kWarp);
  const int64_t floats = 2 * n.key_dim + n.value_dim + 3 * threads / kWarp;
  launch(delta_net_kernel<T>,
         {.grid = dim3(static_cast<unsigned>(n.value_heads), static_cast<unsigned>(p.num_sequences)),
          .block = static_cast<unsigned>(threads),
          .shared_bytes = static_cast<size_t>(floats) * sizeof(float),
          .overlaps_previous = true},
         stream, p);
}

template <class T, int W>
void launch_gate(const SigmoidGateParams& p, Stream stream) {
  constexpr int kThreads = 128;
  const auto blocks = static_cast<unsigned>(ceil_div(p.count, kThreads * W));
  launch(sigmoid_gate_kernel<T, W>, {.grid = blocks, .block = kThreads, .overlaps_previous = true}, stream,
         static_cast<T*>(p.x), static_cast<const T*>(p.gate), p.count);
}

}  // namespace

bool delta::fits(const DeltaNetSizes& n) {
  return n.key_dim == kDim && n.value_dim == kDim && n.conv_width == kWidth && n.row_size() % kQuad == 0;
}

int64_t delta_net_scratch(const DeltaNetSizes& n, int64_t num_tokens, bool one_each) {
  return one_each || !delta::fits(n) ? 0 : num_tokens * (n.conv_channels() + 2 * n.value_heads);
}

void delta_net(const DeltaNetParams& p, Stream stream) {
  const DeltaNetSizes& n = p.sizes;
  check(n.key_heads > 0 && n.value_heads % n.key_heads == 0, "delta_net: value heads must share keys evenly");
  check(n.key_dim > 0 && n.value_dim > 0 && n.conv_width > 0, "delta_net: sizes must be positive");
  check(n.key_dim <= kMostThreads && n.value_dim <= kMostThreads, "delta_net: heads are too large");
  if (!delta::fits(n)) return dispatch(p.dtype, [&]<class T>() { launch_columns<T>(p, stream); });
  for (const void* pointer : {p.rows, static_cast<const void*>(p.taps), static_cast<const void*>(p.norm),
                              static_cast<const void*>(p.out), static_cast<const void*>(p.states),
                              static_cast<const void*>(p.scratch)})
    check(is_aligned(pointer, 16), "delta_net: rows, states and weights are aligned to 16 bytes");
  check(p.slot_stride % delta::kQuad == 0, "delta_net: slots are aligned to 16 bytes");
  p.one_each ? delta::delta_step(p, stream) : delta::delta_scan(p, stream);
}

void sigmoid_gate(const SigmoidGateParams& p, Stream stream) {
  check(p.count >= 0, "sigmoid_gate: negative count");
  dispatch(p.dtype, [&]<class T>() {
    constexpr int kWide = kVectorWidth<T>;
    if (p.count % kWide == 0 && is_aligned(p.x, 16) && is_aligned(p.gate, 16))
      return launch_gate<T, kWide>(p, stream);
    launch_gate<T, 1>(p, stream);
  });
}

}  // namespace bequest::cuda
