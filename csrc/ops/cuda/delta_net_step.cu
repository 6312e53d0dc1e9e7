// One token of each sequence: a block has a head of it, or half of a head's columns. It reads S once and
// writes it once, 64 KB of a head each, and all of that is asked for before the kernel ahead has ended: S and
// the last inputs were left by the step before.
//
// A lane has four columns, or two, a warp an eighth of the keys, so that an access of a warp is a row of S.
// What a column remembers of a key is the sum of eight parts, as in delta_net_scan.cu.
//
// The kernel ends with its stores of S. Where there is room for it, two blocks share a head and store half of
// S each. They are a cluster: the first block gets the results of both and norms them together, so that the
// bits are those of one block.
#include <type_traits>

#include "device/barriers.cuh"
#include "device/cluster.cuh"
#include "device/current_device.cuh"
#include "device/launch.cuh"
#include "ops/cuda/delta_net_kernels.h"
#include "ops/cuda/delta_net_parts.cuh"

namespace bequest::cuda::delta {
namespace {

constexpr int kThreads = kParts * kWarp;
enum Role { kQuery, kKey, kValue, kRoles };  // of the warps that convolve

// A lane's part of S: so many columns of some keys.
template <int kOwn>
struct Held {
  float of[kRounds][kQuad][kOwn];  // keys, columns

  __device__ __forceinline__ void load(const float* matrix, int part, int lane) {
#pragma unroll
    for (int r = 0; r < kRounds; ++r)
#pragma unroll
      for (int k = 0; k < kQuad; ++k)
        load_vector<float, kOwn>(matrix + (key_of(part, r) + k) * kDim + lane * kOwn, of[r][k]);
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
      store_vector<float, kOwn>(matrix + (key_of(part, round) + k) * kDim + lane * kOwn, of[round][k]);
  }
};

// A vector of a head in shared memory.
struct alignas(16) Vector {
  float of[kDim];

  template <int W>
  __device__ __forceinline__ void get(int first, float (&x)[W]) const {
    load_vector<float, W>(of + first, x);
  }
  template <int W>
  __device__ __forceinline__ void set(int first, const float (&x)[W]) {
    store_vector<float, W>(of + first, x);
  }
};

// Sums over all keys, of parts that the warps have made.
template <int kOwn>
__device__ __forceinline__ void join(const Vector (&parts)[kParts], int lane, float (&sum)[kOwn]) {
  float part[kParts][kOwn];
#pragma unroll
  for (int i = 0; i < kParts; ++i) parts[i].get(lane * kOwn, part[i]);
#pragma unroll
  for (int c = 0; c < kOwn; ++c)
    sum[c] = ((part[0][c] + part[1][c]) + (part[2][c] + part[3][c])) +
             ((part[4][c] + part[5][c]) + (part[6][c] + part[7][c]));
}

// Of a lane's columns: what the keys of its warp add.
template <int kOwn>
struct PartSums {
  float of[kRounds][kOwn] = {};

  __device__ __forceinline__ void store(Vector& to, int lane) const {
    float sum[kOwn];
#pragma unroll
    for (int c = 0; c < kOwn; ++c) sum[c] = (of[0][c] + of[1][c]) + (of[2][c] + of[3][c]);
    to.set(lane * kOwn, sum);
  }
};
static_assert(kRounds == 4 && kParts == 8);

// Rows behind the last token of all sequences.
template <class T>
__device__ void clear_padding(const DeltaNetParams& p, int head, int lane) {
  const float zeros[kQuad] = {};
  const int64_t used = p.query_start[p.num_sequences], size = p.sizes.value_size();
  for (int64_t t = blockIdx.y; t < p.num_tokens; t += gridDim.y)
    if (t >= used)
      store_vector<T, kQuad>(static_cast<T*>(p.out) + t * size + head * kDim + lane * kQuad, zeros);
}

// A block's head and sequence, and what of them is there before the rows are: weights, arrays of the step,
// and what the step before has left. Between two steps lies a copy that waits for all kernels, so none that
// runs now writes them.
template <int kOwn>
struct Ahead {
  Past past;
  bool has_token;
  int64_t slot;     // that gets the state, or -1
  int64_t channel;  // of a warp that convolves
  bool keeps;       // it leaves its inputs to the next step
  Held<kOwn> state;
  Window window;
  float taps[kWidth][kQuad], weight[kQuad];
  float decay, step_bias;

  // first: of the block's columns; the block with 0 keeps the inputs
  __device__ __forceinline__ Ahead(const DeltaNetParams& p, int head, int first, int warp, int lane)
      : past(Past::of(p, blockIdx.y)), has_token(p.query_start[blockIdx.y + 1] > past.begin) {
    if (!has_token) return;
    const DeltaNetSizes& n = p.sizes;
    const int sharing = static_cast<int>(n.value_heads / n.key_heads), shared = head / sharing;
    const int64_t vector =
        warp == kQuery ? shared : n.key_heads + (warp == kKey ? shared : n.key_heads + head);
    channel = vector * kDim + lane * kQuad;
    slot = p.slots[past.begin];
    keeps = slot >= 0 && first == 0 && (warp == kValue || head - shared * sharing == 0);
    if (past.inputs != nullptr)
      state.load(past.inputs - n.matrix_floats() + head * kDim * kDim + first, warp, lane);
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
template <int kOwn>
__device__ __forceinline__ void recall(const Held<kOwn>& state, const Vector& key, int part, int lane,
                                       Vector& to) {
  PartSums<kOwn> sums;
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    float keys[kQuad];
    key.get(key_of(part, r), keys);
#pragma unroll
    for (int k = 0; k < kQuad; ++k)
#pragma unroll
      for (int c = 0; c < kOwn; ++c) sums.of[r][c] = fmaf(state.of[r][k][c], keys[k], sums.of[r][c]);
  }
  sums.store(to, lane);
}

// S changes, and is stored at `kept`, if that is somewhere; what a warp's keys then add to the results.
template <int kOwn>
__device__ __forceinline__ void change_state(Held<kOwn>& state, const float (&change)[kOwn], float decay,
                                             const Vector (&vectors)[kRoles], int part, int lane, float* kept,
                                             Vector& to) {
  PartSums<kOwn> sums;
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    float keys[kQuad], queries[kQuad];
    vectors[kKey].get(key_of(part, r), keys);
    vectors[kQuery].get(key_of(part, r), queries);
#pragma unroll
    for (int k = 0; k < kQuad; ++k)
#pragma unroll
      for (int c = 0; c < kOwn; ++c) {
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

// Results of two blocks, in the first one.
class Halves {
 public:
  // By all threads, once; await_cluster() comes before the first send().
  __device__ __forceinline__ void prepare() {
    if (threadIdx.x == 0) {
      there_.init(1);
      publish_barriers();
      there_.arrive_expecting(sizeof(Vector));
    }
    __syncwarp();
    arrive_in_cluster();
  }
  __device__ __forceinline__ void send(int first, const float (&x)[kQuad / 2]) {
    send_async(address_in_block(shared_address(whole_.of + first), 0), make_float2(x[0], x[1]),
               address_in_block(there_.address(), 0));
  }
  // When both are there.
  __device__ __forceinline__ void get(int first, float (&x)[kQuad]) const {
    there_.wait(0);
    whole_.get(first, x);
  }

 private:
  Vector whole_;
  PhaseBarrier there_;
};

template <class T, int kBlocks>
__global__ __maxnreg__(kRegistersBesideChain) void delta_step_kernel(const DeltaNetParams p) {
  constexpr int kOwn = kQuad / kBlocks;
  __shared__ Vector vectors[kRoles], recalled[kParts], results[kParts];
  __shared__ std::conditional_t<kBlocks == 1, char, Halves> halves;
  let_next_start();
  if constexpr (kBlocks > 1) halves.prepare();
  const DeltaNetSizes& n = p.sizes;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int head = static_cast<int>(blockIdx.x) / kBlocks, place = head * kDim + lane * kQuad;
  const int first = static_cast<int>(blockIdx.x) % kBlocks * (kDim / kBlocks);
  Ahead<kOwn> of(p, head, first, warp, lane);
  // Where everything of the row is, found out before it is there.
  const T* const row = static_cast<const T*>(p.rows) + of.past.begin * n.row_size();
  const T *const gates_of = row + gates_at(n) + head, *const z_of = row + n.conv_channels() + place;
  const int64_t value_heads = n.value_heads;
  if constexpr (kBlocks > 1) await_cluster();
  wait_for_previous();
  if (warp == kParts - 1 && first == 0) clear_padding<T>(p, head, lane);  // which has the least to do
  if (!of.has_token) return;
  const float a = widen(gates_of[value_heads]), b = widen(*gates_of);
  float z[kQuad];
  if (warp == 0) load_vector<T, kQuad>(z_of, z);
  if (warp < kRoles) of.convolve(p, row, warp, lane, vectors[warp]);
  const Gates gates = Gates::of(a, b, of.decay, of.step_bias);
  __syncthreads();
  recall(of.state, vectors[kKey], warp, lane, recalled[warp]);
  __syncthreads();
  float remembered[kOwn], value[kOwn], change[kOwn];
  join(recalled, lane, remembered);
  vectors[kValue].get(first + lane * kOwn, value);
#pragma unroll
  for (int c = 0; c < kOwn; ++c) change[c] = change_of(gates, value[c], remembered[c]);
  float* const kept =
      of.slot >= 0 ? p.states + of.slot * p.slot_stride + head * kDim * kDim + first : nullptr;
  change_state(of.state, change, gates.decay, vectors, warp, lane, kept, results[warp]);
  __syncthreads();
  if (warp != 0) return;
  float own[kOwn], o[kQuad];
  join(results, lane, own);
  if constexpr (kBlocks > 1) {
    halves.send(first + lane * kOwn, own);
    if (first > 0) return;
    halves.get(lane * kQuad, o);
  } else {
#pragma unroll
    for (int c = 0; c < kQuad; ++c) o[c] = own[c];
  }
  finish(of.weight, z, p.eps, o);
  store_vector<T, kQuad>(static_cast<T*>(p.out) + of.past.begin * n.value_size() + place, o);
}

}  // namespace

void delta_step(const DeltaNetParams& p, Stream stream) {
  const auto launch_blocks = [&]<class T, int kBlocks>() {
    launch(delta_step_kernel<T, kBlocks>,
           {.grid = dim3(static_cast<unsigned>(p.sizes.value_heads * kBlocks),
                         static_cast<unsigned>(p.num_sequences)),
            .block = kThreads,
            .cluster = kBlocks,
            .overlaps_previous = true},
           stream, p);
  };
  const bool has_room = 2 * p.sizes.value_heads * p.num_sequences <= multiprocessors();
  dispatch(p.dtype, [&]<class T>() {
    if (has_room)
      launch_blocks.template operator()<T, 2>();
    else
      launch_blocks.template operator()<T, 1>();
  });
}

}  // namespace bequest::cuda::delta
