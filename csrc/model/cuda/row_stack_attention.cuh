// The attention of a cluster's heads: tiles of 16 keys are dealt to its warps; states of warps meet in a
// block's shared memory, and states of blocks in that of every block.
#pragma once

#include "model/cuda/row_stack_sums.cuh"

namespace bequest::cuda::stack {

// A lane's angles: of the values 2 l, 2 l + 1, and of their partners 64 further on.
struct LaneAngles {
  float2 cosine, sine;

  __device__ LaneAngles(const Arguments& a, int position, int lane) {
    const float* const row = a.cos_sin + static_cast<int64_t>(position) * kHead;
    cosine = __ldg(reinterpret_cast<const float2*>(row) + lane);
    sine = __ldg(reinterpret_cast<const float2*>(row + kHead / 2) + lane);
  }
};

// A head in a warp: a lane has the pairs l and 32 + l.
struct LaneHead {
  float2 first, second;

  __device__ __forceinline__ explicit LaneHead(const uint32_t (&words)[kTileWords], int lane)
      : first{low_of(words[lane]), high_of(words[lane])},
        second{low_of(words[lane + kWarp]), high_of(words[lane + kWarp])} {}

  __device__ __forceinline__ void norm(const BFloat16* weight, float eps, int lane) {
    const auto* const pairs = reinterpret_cast<const uint32_t*>(weight);
    const uint32_t low = __ldg(pairs + lane), high = __ldg(pairs + lane + kWarp);
    const float square = first.x * first.x + first.y * first.y + second.x * second.x + second.y * second.y;
    const float factor = rsqrtf(warp_sum(square) / kHead + eps);
    // Rounded between norm and rotation, as two separate operations would.
    const uint32_t one = pack(first.x * factor * low_of(low), first.y * factor * high_of(low));
    const uint32_t two = pack(second.x * factor * low_of(high), second.y * factor * high_of(high));
    first = {low_of(one), high_of(one)};
    second = {low_of(two), high_of(two)};
  }

  __device__ __forceinline__ void turn(const LaneAngles& angles) {
    const float2 c = angles.cosine, s = angles.sine, old = first;
    first = {old.x * c.x - second.x * s.x, old.y * c.y - second.y * s.y};
    second = {second.x * c.x + old.x * s.x, second.y * c.y + old.y * s.y};
  }

  __device__ __forceinline__ uint2 packed() const {
    return {pack(first.x, first.y), pack(second.x, second.y)};
  }
};

// What a warp has gathered of heads l % 4 * 2 + {0, 1}: the scores' maximum, the lane's part of the weights'
// sum, and the sums of values 16 j + l / 4 + {0, 8}.
struct WarpHeads {
  float m[2] = {-INFINITY, -INFINITY}, d[2] = {};
  float o[kHead / kTileRows][4] = {};
};

// Over lanes with the same l % 4.
template <class Op>
__device__ __forceinline__ float reduce_rows(float v, Op op) {
#pragma unroll
  for (int distance = 4; distance < kWarp; distance *= 2) v = op(v, __shfl_xor_sync(kAllLanes, v, distance));
  return v;
}

template <int A>
class HeadAttention {
 public:
  __device__ HeadAttention(const Arguments& a, Shared<A>& shared, int warp, int lane)
      : a_(a),
        shared_(shared),
        range_(a),
        warp_(warp),
        lane_(lane),
        angles_(a, range_.position, lane),
        own_(range_.stores ? a.layout.key_of_slot(__ldg(a.slot), 0, place_.cluster) : 0),
        rows_first_(rows_first_offset(lane)),
        columns_first_(columns_first_offset(lane)) {}

  // Leaves attended rows in shared memory, from projected ones. By all warps that multiply.
  // `go_ahead`: what needs none of them and is done while states are on their way
  template <class F>
  __device__ void attend(const Layer& layer, Tiles& tiles, uint32_t parity, F&& go_ahead) {
    Fragments keys, values;
    const int first = Range::first_tile(place_.rank, warp_);
    if (first < range_.tiles) take(tiles, first, keys, values);
    make_heads(layer, parity);
    sync_consumers();
    leave_own();
    WarpHeads heads;
    uint32_t q[16] = {};
    load_queries(q);
    for (int tile = first; tile < range_.tiles; tile += kRoundTiles) {
      if (tile != first) take(tiles, tile, keys, values);
      add_tile(keys, values, q, tile, tile == first, heads);
    }
    leave(heads);
    sync_consumers();
    send_states();
    go_ahead();
    merge_states(parity);
  }

  __device__ static uint32_t states_bytes(int group) {
    return kCluster * group * static_cast<uint32_t>(kHead * sizeof(float) + sizeof(float2));
  }

 private:
  __device__ __forceinline__ bool has_own() const { return range_.stores && range_.has_last(place_.rank); }

  // A tile's keys, and its values transposed.
  __device__ __forceinline__ void take(Tiles& tiles, int tile, Fragments& keys, Fragments& values) const {
    keys.load(tiles.await() + rows_first_);
    tiles.give_back(lane_);
    const uint32_t at = tiles.await();
    if (tile == range_.last_tile()) clear_behind(at);
#pragma unroll
    for (int j = 0; j < 8; ++j)
      load_matrices_transposed(values.w[j], (at + columns_first_ + j / 4 * kPanelBytes) ^ (32 * (j % 4)));
    tiles.give_back(lane_);
  }

  // A block may hold anything behind the last token of the cache.
  __device__ __forceinline__ void clear_behind(uint32_t tile) const {
    constexpr int kPieces = kTileBytes / 16;
    for (int i = lane_; i < kPieces; i += kWarp)
      if (i % (kPieces / 2) / 8 >= range_.end - range_.last_tile() * kTileRows)
        store_16(tile + i * 16, uint4{});
    fence_async_proxy();
    __syncwarp();
  }

  __device__ __forceinline__ void make_heads(const Layer& layer, uint32_t parity) {
    shared_.rows_there.wait(parity);
    const int count = a_.group + (has_own() ? 2 : 0);
#pragma unroll 1
    for (int i = warp_; i < count; i += kWarps) {
      LaneHead head(shared_.rows[i], lane_);
      if (i <= a_.group) {
        const BFloat16* const weight = i < a_.group ? layer.q_norm : layer.k_norm;
        if (weight != nullptr) head.norm(weight, a_.head_eps, lane_);
        head.turn(angles_);
      }
      const uint2 pairs = head.packed();
      uint32_t* const to = i < a_.group ? shared_.queries[i] : shared_.own[i - a_.group];
      const bool in_order = i > a_.group;  // values are
      to[in_order ? lane_ : place_of_pair(lane_)] = pairs.x;
      to[in_order ? lane_ + kWarp : place_of_pair(lane_ + kWarp)] = pairs.y;
      if (i >= a_.group) store_own(layer, i - a_.group, pairs);
    }
    if (threadIdx.x == 0) shared_.rows_there.arrive_expecting((a_.group + 2) * kTileWords * 4);
  }

  // The token's key or value.
  __device__ __forceinline__ void store_own(const Layer& layer, int kind, const uint2& pairs) const {
    const int64_t place = own_ + a_.layout.keys(layer.cache_layer, 0) + kind * a_.layout.values_after_keys();
    auto* const to = reinterpret_cast<uint32_t*>(a_.kv_cache + place);
    to[lane_] = pairs.x;
    to[lane_ + kWarp] = pairs.y;
  }

  // The token sees itself: a state of its own, by the last warp, which has the fewest tiles.
  __device__ __forceinline__ void leave_own() {
    if (warp_ != kWarps - 1 || !has_own()) return;
    const uint2 key = reinterpret_cast<const uint2*>(shared_.own[0])[lane_];
    const uint2 value = reinterpret_cast<const uint2*>(shared_.own[1])[lane_];
    for (int head = 0; head < a_.group; ++head) {
      const uint2 query = reinterpret_cast<const uint2*>(shared_.queries[head])[lane_];
      const float score = warp_sum(low_of(query.x) * low_of(key.x) + high_of(query.x) * high_of(key.x) +
                                   low_of(query.y) * low_of(key.y) + high_of(query.y) * high_of(key.y));
      if (lane_ == 0) shared_.scales[kWarps][head] = {score * a_.score_factor, 1.0f};
      reinterpret_cast<float4*>(shared_.states[kWarps][head])[lane_] = {low_of(value.x), high_of(value.x),
                                                                        low_of(value.y), high_of(value.y)};
    }
  }

  __device__ __forceinline__ void load_queries(uint32_t (&q)[16]) const {
    if (lane_ / 4 >= a_.group) return;
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(&shared_.queries[lane_ / 4][lane_ % 4 * 16 + i]);
      q[i] = four.x, q[i + 1] = four.y, q[i + 2] = four.z, q[i + 3] = four.w;
    }
  }

  __device__ __forceinline__ void add_tile(const Fragments& keys, const Fragments& values,
                                           const uint32_t (&q)[16], int tile, bool is_first,
                                           WarpHeads& heads) const {
    TileSums sums{};
    multiply(sums, keys, q);
    // Of keys l / 4 and l / 4 + 8, and heads l % 4 * 2 + {0, 1}.
    float s[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool seen = tile * kTileRows + lane_ / 4 + i / 2 * 8 < range_.end;
      const float score = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
      s[i] = seen ? score * a_.score_factor : -INFINITY;
    }
    float factors[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float highest = reduce_rows(fmaxf(s[i], s[i + 2]), [](float x, float y) { return fmaxf(x, y); });
      const float m = fmaxf(heads.m[i], highest), base = m == -INFINITY ? 0.0f : m;
      factors[i] = exp2f(heads.m[i] - base);
      s[i] = exp2f(s[i] - base);
      s[i + 2] = exp2f(s[i + 2] - base);
      heads.m[i] = m;
      heads.d[i] = heads.d[i] * factors[i] + s[i] + s[i + 2];
    }
    if (!is_first) {
#pragma unroll
      for (auto& o : heads.o) o[0] *= factors[0], o[1] *= factors[1], o[2] *= factors[0], o[3] *= factors[1];
    }
    const uint32_t low = transposed(pack(s[0], s[1])), high = transposed(pack(s[2], s[3]));
#pragma unroll
    for (int j = 0; j < kHead / kTileRows; ++j) multiply_accumulate(heads.o[j], values.w[j], low, high);
  }

  __device__ __forceinline__ void leave(const WarpHeads& heads) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float d = reduce_rows(heads.d[i], [](float x, float y) { return x + y; });
      const int head = lane_ % 4 * 2 + i;
      if (head >= a_.group) continue;
      if (lane_ < 4) shared_.scales[warp_][head] = {heads.m[i], d};
      float* const to = shared_.states[warp_][head] + lane_ / 4;
#pragma unroll
      for (int j = 0; j < kHead / kTileRows; ++j) {
        to[j * kTileRows] = heads.o[j][i];
        to[j * kTileRows + 8] = heads.o[j][i + 2];
      }
    }
  }

  // This block's states, merged, to all blocks of the cluster.
  __device__ __forceinline__ void send_states() {
    constexpr int kVectors = kHead / 4, kThreadsOfVectors = 2 * kVectors;
    for (int v = static_cast<int>(threadIdx.x) % kThreadsOfVectors; v < a_.group * kVectors;
         v += kThreadsOfVectors) {
      const int head = v / kVectors;
      float2 parts[kWarps + 1];
      float4 values[kWarps + 1];
#pragma unroll
      for (int w = 0; w <= kWarps; ++w) {
        const bool is_there = w < kWarps || has_own();
        parts[w] = is_there ? shared_.scales[w][head] : float2{-INFINITY, 0};
        values[w] =
            is_there ? reinterpret_cast<const float4*>(shared_.states[w][head])[v % kVectors] : float4{};
      }
      float2 scale{-INFINITY, 0};
#pragma unroll
      for (const float2& part : parts) scale.x = fmaxf(scale.x, part.x);
      const float base = scale.x == -INFINITY ? 0.0f : scale.x;
      float4 o{};
#pragma unroll
      for (int w = 0; w <= kWarps; ++w) {
        const float factor = exp2f(parts[w].x - base);
        o = {o.x + factor * values[w].x, o.y + factor * values[w].y, o.z + factor * values[w].z,
             o.w + factor * values[w].w};
        scale.y += factor * parts[w].y;
      }
#pragma unroll
      for (int i = 0; i < kCluster; i += kConsumers / kThreadsOfVectors) {
        const int to = i + static_cast<int>(threadIdx.x) / kThreadsOfVectors;
        send(&shared_.all_states[place_.rank][v], shared_.states_there, to, o);
        if (v % kVectors == 0) send(&shared_.all_scales[place_.rank][head], shared_.states_there, to, scale);
      }
    }
  }

  // All blocks' states become rows that the output product reads.
  __device__ __forceinline__ void merge_states(uint32_t parity) {
    shared_.states_there.wait(parity);
    for (int i = static_cast<int>(threadIdx.x); i < a_.group * kTileWords; i += kConsumers) {
      const int head = i / kTileWords;
      float m = -INFINITY;
#pragma unroll
      for (int r = 0; r < kCluster; ++r) m = fmaxf(m, shared_.all_scales[r][head].x);
      const float base = m == -INFINITY ? 0.0f : m;
      float d = 0;
      float2 o{};
#pragma unroll
      for (int r = 0; r < kCluster; ++r) {
        const float2 scale = shared_.all_scales[r][head];
        const float factor = exp2f(scale.x - base);
        const float2 values = reinterpret_cast<const float2*>(shared_.all_states[r])[i];
        o = {o.x + factor * values.x, o.y + factor * values.y};
        d += factor * scale.y;
      }
      const float factor = d > 0 ? 1.0f / d : 0.0f;
      shared_.attended[head][place_of_pair(i % kTileWords)] = pack(o.x * factor, o.y * factor);
    }
    sync_consumers();
    if (threadIdx.x == 0) shared_.states_there.arrive_expecting(states_bytes(a_.group));
  }

  const Arguments& a_;
  Shared<A>& shared_;
  const Place place_;
  const Range range_;
  const int warp_, lane_;
  const LaneAngles angles_;
  const int64_t own_;  // where the token's key in the first layer of the cache is
  const uint32_t rows_first_, columns_first_;
};

}  // namespace bequest::cuda::stack
