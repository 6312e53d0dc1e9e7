// One token of each sequence: a block has a head of it. It reads S once and writes it once, 64 KB each, and
// all of that is asked for before the kernel ahead has ended: S and the last inputs were left by the step
// before.
//
// A lane has four columns, a warp an eighth of the keys, so that an access of a warp is a row of S. What a
// column remembers of a key is the sum of eight parts, as in delta_net_scan.cu.
#include "device/launch.cuh"
#include "ops/cuda/delta_net_kernels.h"
#include "ops/cuda/delta_net_parts.cuh"

namespace bequest::cuda::delta {
namespace {

constexpr int kThreads = kParts * kWarp;
enum Role { kQuery, kKey, kValue, kRoles };  // of the warps that convolve

// A lane's part of S.
struct Held {
  float of[kRounds][kQuad][kQuad];  // keys, columns

  __device__ __forceinline__ void load(const float* matrix, int part, int lane) {
#pragma unroll
    for (int r = 0; r < kRounds; ++r)
#pragma unroll
      for (int k = 0; k < kQuad; ++k)
        load_vector<float, kQuad>(matrix + (key_of(part, r) + k) * kDim + lane * kQuad, of[r][k]);
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& round : of)
#pragma unroll
      for (auto& key : round)
#pragma unroll
        for (float& each : key) each = 0.0f;
  }
  __device__ __forceinline__ void store(float* matrix, int part, int round, int lane) const {
#pragma unroll
    for (int k = 0; k < kQuad; ++k)
      store_vector<float, kQuad>(matrix + (key_of(part, round) + k) * kDim + lane * kQuad, of[round][k]);
  }
};

// A vector of a head in shared memory.
struct alignas(16) Vector {
  float of[kDim];

  __device__ __forceinline__ void get(int first, float (&x)[kQuad]) const {
    load_vector<float, kQuad>(of + first, x);
  }
  __device__ __forceinline__ void set(int first, const float (&x)[kQuad]) {
    store_vector<float, kQuad>(of + first, x);
  }
};

// Sums over all keys, of parts that the warps have made.
__device__ __forceinline__ void join(const Vector (&parts)[kParts], int lane, float (&sum)[kQuad]) {
  float part[kParts][kQuad];
#pragma unroll
  for (int i = 0; i < kParts; ++i) parts[i].get(lane * kQuad, part[i]);
#pragma unroll
  for (int c = 0; c < kQuad; ++c)
    sum[c] = ((part[0][c] + part[1][c]) + (part[2][c] + part[3][c])) +
             ((part[4][c] + part[5][c]) + (part[6][c] + part[7][c]));
}

// Of a lane's columns: what the keys of its warp add.
struct PartSums {
  float of[kRounds][kQuad] = {};

  __device__ __forceinline__ void store(Vector& to, int lane) const {
    float sum[kQuad];
#pragma unroll
    for (int c = 0; c < kQuad; ++c) sum[c] = (of[0][c] + of[1][c]) + (of[2][c] + of[3][c]);
    to.set(lane * kQuad, sum);
  }
};
static_assert(kRounds == 4 && kParts == 8);

// Rows behind the last token of all sequences.
template <class T>
__device__ void clear_padding(const DeltaNetParams& p, int lane) {
  const float zeros[kQuad] = {};
  const int64_t used = p.query_start[p.num_sequences], size = p.sizes.value_size();
  for (int64_t t = blockIdx.y; t < p.num_tokens; t += gridDim.y)
    if (t >= used)
      store_vector<T, kQuad>(static_cast<T*>(p.out) + t * size + blockIdx.x * kDim + lane * kQuad, zeros);
}

// A block's head and sequence, and what of them is there before the rows are: weights, arrays of the step,
// and what the step before has left. Between two steps lies a copy that waits for all kernels, so none that
// runs now writes them.
struct Ahead {
  Past past;
  bool has_token;
  int64_t slot;     // that gets the state, or -1
  int64_t channel;  // of a warp that convolves
  bool keeps;       // it leaves its inputs to the next step
  Held state;
  Window window;
  float taps[kWidth][kQuad], weight[kQuad];
  float decay, step_bias;

  __device__ __forceinline__ Ahead(const DeltaNetParams& p, int head, int warp, int lane)
      : past(Past::of(p, blockIdx.y)), has_token(p.query_start[blockIdx.y + 1] > past.begin) {
    if (!has_token) return;
    const DeltaNetSizes& n = p.sizes;
    const int sharing = static_cast<int>(n.value_heads / n.key_heads), shared = head / sharing;
    const int64_t vector =
        warp == kQuery ? shared : n.key_heads + (warp == kKey ? shared : n.key_heads + head);
    channel = vector * kDim + lane * kQuad;
    slot = p.slots[past.begin];
    keeps = slot >= 0 && (warp == kValue || head - shared * sharing == 0);
    if (past.inputs != nullptr)
      state.load(past.inputs - n.matrix_floats() + head * kDim * kDim, warp, lane);
    else
      state.clear();
    load_constant<float, kQuad>(p.norm + lane * kQuad, weight);
    decay = p.decay[head];
    step_bias = p.step_bias[head];
    if (warp >= kRoles) return;
    window.load_past(past, 0, n.conv_channels(), channel);
    load_taps(p, channel, taps);
  }

  // The warp's vector, when the row is there.
  template <class T>
  __device__ __forceinline__ void convolve(const DeltaNetParams& p, const T* row, int warp, int lane,
                                           Vector& to) {
    window.load_rows(row, 0, p.sizes.row_size(), channel);
    float y[kQuad];
    window.convolve(taps, y);
    if (warp != kValue) scale_to(warp == kQuery ? kQueryLength : 1.0f, y);
    to.set(lane * kQuad, y);
    if (keeps) window.keep(p, slot, channel);
  }
};

// What a warp's keys add to what columns remember of the key.
__device__ __forceinline__ void recall(const Held& state, const Vector& key, int part, int lane, Vector& to) {
  PartSums sums;
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    float keys[kQuad];
    key.get(key_of(part, r), keys);
#pragma unroll
    for (int k = 0; k < kQuad; ++k)
#pragma unroll
      for (int c = 0; c < kQuad; ++c) sums.of[r][c] = fmaf(state.of[r][k][c], keys[k], sums.of[r][c]);
  }
  sums.store(to, lane);
}

// S changes, and is stored at `kept`, if that is somewhere; what a warp's keys then add to the results.
__device__ __forceinline__ void change_state(Held& state, const float (&change)[kQuad], float decay,
                                             const Vector (&vectors)[kRoles], int part, int lane, float* kept,
                                             Vector& to) {
  PartSums sums;
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    float keys[kQuad], queries[kQuad];
    vectors[kKey].get(key_of(part, r), keys);
    vectors[kQuery].get(key_of(part, r), queries);
#pragma unroll
    for (int k = 0; k < kQuad; ++k)
#pragma unroll
      for (int c = 0; c < kQuad; ++c) {
        state.of[r][k][c] = fmaf(change[c], keys[k], state.of[r][k][c] * decay);
        sums.of[r][c] = fmaf(state.of[r][k][c], queries[k], sums.of[r][c]);
      }
    if (kept != nullptr) state.store(kept, part, r, lane);
  }
  sums.store(to, lane);
}

// Of one sequence it begins beside the chain of products ahead: a quarter of a multiprocessor has three warps
// of that with 96 registers each, and with these just room for two of ours.
constexpr int kRegistersBesideChain = 112;

template <class T>
__global__ __maxnreg__(kRegistersBesideChain) void delta_step_kernel(const DeltaNetParams p) {
  __shared__ Vector vectors[kRoles], recalled[kParts], results[kParts];
  let_next_start();
  const DeltaNetSizes& n = p.sizes;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int head = static_cast<int>(blockIdx.x), place = head * kDim + lane * kQuad;
  Ahead of(p, head, warp, lane);
  // Where everything of the row is, found out before it is there.
  const T* const row = static_cast<const T*>(p.rows) + of.past.begin * n.row_size();
  const T *const gates_of = row + gates_at(n) + head, *const z_of = row + n.conv_channels() + place;
  const int64_t value_heads = n.value_heads;
  wait_for_previous();
  if (warp == kParts - 1) clear_padding<T>(p, lane);  // which has the least to do
  if (!of.has_token) return;
  const float a = widen(gates_of[value_heads]), b = widen(*gates_of);
  float z[kQuad];
  if (warp == 0) load_vector<T, kQuad>(z_of, z);
  if (warp < kRoles) of.convolve(p, row, warp, lane, vectors[warp]);
  const Gates gates = Gates::of(a, b, of.decay, of.step_bias);
  __syncthreads();
  recall(of.state, vectors[kKey], warp, lane, recalled[warp]);
  __syncthreads();
  float remembered[kQuad], value[kQuad], change[kQuad];
  join(recalled, lane, remembered);
  vectors[kValue].get(lane * kQuad, value);
#pragma unroll
  for (int c = 0; c < kQuad; ++c) change[c] = change_of(gates, value[c], remembered[c]);
  float* const kept = of.slot >= 0 ? p.states + of.slot * p.slot_stride + head * kDim * kDim : nullptr;
  change_state(of.state, change, gates.decay, vectors, warp, lane, kept, results[warp]);
  __syncthreads();
  if (warp != 0) return;
  float o[kQuad];
  join(results, lane, o);
  finish(of.weight, z, p.eps, o);
  store_vector<T, kQuad>(static_cast<T*>(p.out) + of.past.begin * n.value_size() + place, o);
}

}  // namespace

void delta_step(const DeltaNetParams& p, Stream stream) {
  dispatch(p.dtype, [&]<class T>() {
    launch(delta_step_kernel<T>,
           {.grid = dim3(static_cast<unsigned>(p.sizes.value_heads), static_cast<unsigned>(p.num_sequences)),
            .block = kThreads,
            .overlaps_previous = true},
           stream, p);
  });
}

}  // namespace bequest::cuda::delta
