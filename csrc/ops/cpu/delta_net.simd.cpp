#include "ops/cpu/delta_net.h"

#include "core/simd.h"
#include "core/threads.h"
#include "ops/cpu/activation_functions.h"
#include "ops/cpu/delta_net_passes.h"

namespace bequest::BEQUEST_ISA {
namespace {

constexpr int64_t kStrip = 64;  // columns of S that one item of work keeps in L1

float sum_of_squares(const float* x, int64_t n) {
  VecF sums = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) sums = load(x + i) * load(x + i) + sums;
  float sum = reduce_add(sums);
  for (; i < n; ++i) sum = x[i] * x[i] + sum;
  return sum;
}

void scale_row(float* x, int64_t n, float factor) {
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

// A vector of columns, or a single one where too few are left.
template <class V>
V load_as(const float* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
template <class V>
void store_as(float* p, V v) {
  __builtin_memcpy(p, &v, sizeof(v));
}
template <class V>
constexpr int64_t kWidth = sizeof(V) / sizeof(float);

class DeltaNet {
 public:
  DeltaNet(const DeltaNetParams& p, const DeltaNetScratch& scratch) : p_(p), n_(p.sizes), scratch_(scratch) {}

  void run() const {
    for (int64_t s = 0; s < p_.num_sequences; ++s) convolve_chunk(s);
    // Everybody has read the inputs that are replaced now.
    parallel_for(p_.num_sequences, 1, [&](int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; ++s) keep_chunk(s);
    });
    recur();
    parallel_for(p_.num_tokens, 1 + 8192 / (n_.value_heads * n_.value_dim), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) norm_and_gate(t);
    });
  }

 private:
  const float* row(int64_t t) const { return p_.rows + t * n_.row_size(); }
  float* matrices(int64_t slot) const { return p_.states + slot * p_.slot_stride; }
  float* inputs(int64_t slot) const { return matrices(slot) + n_.matrix_floats(); }

  // --- convolution -------------------------------------------------------------------------------------

  // The inputs [C] of the token so many before token t; null: the sequence has none.
  const float* input(int64_t sequence, int64_t t, int64_t back) const {
    const int64_t offset = t - p_.query_start[sequence] - back;  // in the chunk
    if (offset >= 0) return row(t - back);
    const int64_t start = p_.starts[sequence];
    return start < 0 ? nullptr : inputs(start) + (n_.conv_width - 1 + offset) * n_.conv_channels();
  }

  void convolve_chunk(int64_t sequence) const {
    const int64_t first = p_.query_start[sequence], count = p_.query_start[sequence + 1] - first;
    parallel_for(count, 1 + 8192 / n_.conv_channels(), [&](int64_t begin, int64_t end) {
      for (int64_t t = first + begin; t < first + end; ++t) convolve(sequence, t);
    });
  }

  void convolve(int64_t sequence, int64_t t) const {
    const int64_t channels = n_.conv_channels();
    float* const out = scratch_.convolved + t * channels;
    const float* const own = p_.taps + (n_.conv_width - 1) * channels;
    for (int64_t c = 0; c < channels; ++c) out[c] = row(t)[c] * own[c];
    for (int64_t back = 1; back < n_.conv_width; ++back) {
      const float* const x = input(sequence, t, back);
      if (x == nullptr) break;
      const float* const tap = own - back * channels;
      for (int64_t c = 0; c < channels; ++c) out[c] = x[c] * tap[c] + out[c];
    }
    apply_row<Silu>(out, channels);
    const int64_t keys = n_.key_heads * n_.key_dim;
    scale_to_length_one(out, 1.0f / __builtin_sqrtf(static_cast<float>(n_.key_dim)));
    scale_to_length_one(out + keys, 1.0f);
    make_gates(t);
  }

  void scale_to_length_one(float* heads, float factor) const {
    for (int64_t h = 0; h < n_.key_heads; ++h) {
      float* const head = heads + h * n_.key_dim;
      const float square = sum_of_squares(head, n_.key_dim) + kSmallestSquare;
      scale_row(head, n_.key_dim, factor / __builtin_sqrtf(square));
    }
  }

  void make_gates(int64_t t) const {
    const int64_t heads = n_.value_heads;
    const float* const b = row(t) + n_.conv_channels() + heads * n_.value_dim;
    float* const decays = scratch_.gates + t * 2 * heads;
    for (int64_t h = 0; h < heads; ++h) {
      const float a = b[heads + h] + p_.step_bias[h];
      const float softplus = a > 20.0f ? a : __builtin_log1pf(__builtin_expf(a));
      decays[h] = __builtin_expf(p_.decay[h] * softplus);
      decays[heads + h] = 1.0f / (1.0f + __builtin_expf(-b[h]));
    }
  }

  // In the order of tokens: the last one may replace what those before it read.
  void keep_chunk(int64_t sequence) const {
    for (int64_t t = p_.query_start[sequence]; t < p_.query_start[sequence + 1]; ++t)
      if (p_.slots[t] >= 0) keep_inputs(sequence, t, p_.slots[t]);
  }

  void keep_inputs(int64_t sequence, int64_t t, int64_t slot) const {
    const int64_t channels = n_.conv_channels();
    // Oldest first: where a state is replaced in place, an input moves towards the front.
    for (int64_t i = 0; i < n_.conv_width - 1; ++i) {
      const float* const x = input(sequence, t, n_.conv_width - 2 - i);
      float* const kept = inputs(slot) + i * channels;
      if (x == nullptr)
        __builtin_memset(kept, 0, channels * sizeof(float));
      else if (x != kept)
        __builtin_memcpy(kept, x, channels * sizeof(float));
    }
  }

  // --- the recurrence ----------------------------------------------------------------------------------

  void recur() const {
    const int64_t strips = (n_.value_dim + kStrip - 1) / kStrip;
    for_each_item(p_.num_sequences * n_.value_heads * strips, [&](int64_t item, int) {
      const int64_t first = item % strips * kStrip, rest = item / strips;
      const int64_t end = first + kStrip < n_.value_dim ? first + kStrip : n_.value_dim;
      recur_columns(rest / n_.value_heads, rest % n_.value_heads, first, end);
    });
  }

  void recur_columns(int64_t sequence, int64_t head, int64_t column, int64_t end) const {
    if (p_.query_start[sequence] == p_.query_start[sequence + 1]) return;
    for (; column + kStrip <= end; column += kStrip)
      recur_strip<VecF, kStrip / kLanes>(sequence, head, column);
    for (; column + kLanes <= end; column += kLanes) recur_strip<VecF, 1>(sequence, head, column);
    for (; column < end; ++column) recur_strip<float, 1>(sequence, head, column);
  }

  // N vectors of columns of one head's S, through all tokens of the sequence in the step.
  template <class V, int N>
  void recur_strip(int64_t sequence, int64_t head, int64_t column) const {
    const int64_t begin = p_.query_start[sequence], end = p_.query_start[sequence + 1];
    const int64_t place = head * n_.key_dim * n_.value_dim + column;
    float* const to = matrices(p_.slots[end - 1]) + place;
    const float* from = p_.starts[sequence] < 0 ? to : matrices(p_.starts[sequence]) + place;
    if (p_.starts[sequence] < 0) clear<V, N>(to);
    for (int64_t t = begin; t < end; ++t) {
      advance<V, N>(t, head, column, from, to);
      from = to;
      if (t + 1 < end && p_.slots[t] >= 0) copy<V, N>(to, matrices(p_.slots[t]) + place);
    }
  }

  template <class V, int N>
  void clear(float* matrix) const {
    for (int64_t k = 0; k < n_.key_dim; ++k) __builtin_memset(matrix + k * n_.value_dim, 0, N * sizeof(V));
  }

  template <class V, int N>
  void copy(const float* from, float* to) const {
    for (int64_t k = 0; k < n_.key_dim; ++k)
      __builtin_memcpy(to + k * n_.value_dim, from + k * n_.value_dim, N * sizeof(V));
  }

  template <class V, int N>
  void advance(int64_t t, int64_t head, int64_t column, const float* from, float* to) const {
    const int64_t key_head = head / (n_.value_heads / n_.key_heads), keys = n_.key_heads * n_.key_dim;
    const float* const q = scratch_.convolved + t * n_.conv_channels() + key_head * n_.key_dim;
    const float* const k = q + keys;
    const float* const v =
        scratch_.convolved + t * n_.conv_channels() + 2 * keys + head * n_.value_dim + column;
    const float* const gates = scratch_.gates + t * 2 * n_.value_heads + head;
    const float decay = gates[0], rate = gates[n_.value_heads];
    V remembered[N] = {};
    for (int64_t j = 0; j < n_.key_dim; ++j)
      for (int i = 0; i < N; ++i)
        remembered[i] = load_as<V>(from + j * n_.value_dim + i * kWidth<V>) * k[j] + remembered[i];
    V change[N], gathered[N] = {};
    for (int i = 0; i < N; ++i) change[i] = (load_as<V>(v + i * kWidth<V>) - decay * remembered[i]) * rate;
    for (int64_t j = 0; j < n_.key_dim; ++j)
      for (int i = 0; i < N; ++i) {
        const V kept = load_as<V>(from + j * n_.value_dim + i * kWidth<V>) * decay;
        const V s = change[i] * k[j] + kept;
        store_as<V>(to + j * n_.value_dim + i * kWidth<V>, s);
        gathered[i] = s * q[j] + gathered[i];
      }
    float* const out = p_.out + (t * n_.value_heads + head) * n_.value_dim + column;
    for (int i = 0; i < N; ++i) store_as<V>(out + i * kWidth<V>, gathered[i]);
  }

  // --- the norm ----------------------------------------------------------------------------------------

  void norm_and_gate(int64_t t) const {
    const float* const z = row(t) + n_.conv_channels();
    for (int64_t h = 0; h < n_.value_heads; ++h) {
      float* const out = p_.out + (t * n_.value_heads + h) * n_.value_dim;
      const float mean = sum_of_squares(out, n_.value_dim) / static_cast<float>(n_.value_dim);
      const float scale = 1.0f / __builtin_sqrtf(mean + p_.eps);
      for (int64_t i = 0; i < n_.value_dim; ++i) out[i] = p_.norm[i] * (out[i] * scale);
      gate_row<Silu>(z + h * n_.value_dim, out, out, n_.value_dim);
    }
  }

  const DeltaNetParams& p_;
  const DeltaNetSizes& n_;
  const DeltaNetScratch& scratch_;
};

}  // namespace

void delta_net(const DeltaNetParams& p, const DeltaNetScratch& scratch) { DeltaNet(p, scratch).run(); }

}  // namespace bequest::BEQUEST_ISA
