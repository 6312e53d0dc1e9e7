// What the kernels' tensors are to the bindings: addresses with the sizes that engine/kernels has checked.
#pragma once

#include <cstdint>

#include "bindings/fields.h"
#include "cache/kv_layout.h"
#include "core/dtype.h"
#include "ops/cpu/linear.h"
#include "ops/hidden_tap.h"

namespace bequest {

// --- objects: made once, by whoever owns the memory

// A weight [N, K] as ops/cpu/linear.h packs it.
struct PackedMatrix {
  void* data;
  WeightFormat format;
  int64_t out_features;  // N
  int64_t in_features;   // K
};

// A cache tensor [NB, L, 2, NKV, BS, D].
struct KvCacheView {
  void* data;
  DType dtype;
  KvLayout layout;
};

// --- tuples: of one call

template <>
inline constexpr auto fields_of<KvLayout> =
    std::tuple(&KvLayout::num_blocks, &KvLayout::num_layers, &KvLayout::num_kv_heads, &KvLayout::block_size,
               &KvLayout::head_dim);

// [count, …] float32, dense rows.
struct Rows {
  float* data;
  int64_t count;
  int64_t stride;  // elements between rows
};
template <>
inline constexpr auto fields_of<Rows> = std::tuple(&Rows::data, &Rows::count, &Rows::stride);

// [T, heads, D], the heads of a token dense: perhaps a slice of a fused row.
struct Heads {
  void* data;
  int64_t num_tokens;
  int64_t num_heads;
  int64_t head_dim;
  int64_t stride;  // elements between tokens
};
template <>
inline constexpr auto fields_of<Heads> =
    std::tuple(&Heads::data, &Heads::num_tokens, &Heads::num_heads, &Heads::head_dim, &Heads::stride);

// [rows, columns], dense.
struct Matrix {
  void* data;
  int64_t rows;
  int64_t columns;
  DType dtype;
};
template <>
inline constexpr auto fields_of<Matrix> =
    std::tuple(&Matrix::data, &Matrix::rows, &Matrix::columns, &Matrix::dtype);

// Logits [N, V], rows `stride` elements apart.
struct Logits {
  void* data;
  int64_t num;
  int64_t vocab_size;
  int64_t stride;
  DType dtype;
};
template <>
inline constexpr auto fields_of<Logits> =
    std::tuple(&Logits::data, &Logits::num, &Logits::vocab_size, &Logits::stride, &Logits::dtype);

// Where log-probabilities go: ops/cpu/logprobs.h.
struct LogprobOutput {
  float* chosen;     // [N]
  int32_t* rank;     // [N]
  int32_t* top_ids;  // [N, K]
  float* top;        // [N, K]
};
template <>
inline constexpr auto fields_of<LogprobOutput> =
    std::tuple(&LogprobOutput::chosen, &LogprobOutput::rank, &LogprobOutput::top_ids, &LogprobOutput::top);

// The weights of a norm, [H] each.
struct Norm {
  void* weight;
  void* bias;  // null: a root-mean-square norm
  float eps;
};
template <>
inline constexpr auto fields_of<Norm> = std::tuple(&Norm::weight, &Norm::bias, &Norm::eps);

template <>
inline constexpr auto fields_of<HiddenTap> =
    std::tuple(&HiddenTap::ring_rows, &HiddenTap::layers, &HiddenTap::ring, &HiddenTap::num_ring_rows,
               &HiddenTap::layer, &HiddenTap::store_output);

// Blocks of a cache, [count, bytes of a block].
struct Blocks {
  void* data;
  int64_t count;
};
template <>
inline constexpr auto fields_of<Blocks> = std::tuple(&Blocks::data, &Blocks::count);

// One layer of a cache, and what its stored keys and values are to be multiplied by. Products and quotients
// of the scales are made in float64, then rounded.
struct LayerCache {
  KvCacheView cache;
  int64_t layer;
  double key_scale;
  double value_scale;
};
template <>
inline constexpr auto fields_of<LayerCache> =
    std::tuple(&LayerCache::cache, &LayerCache::layer, &LayerCache::key_scale, &LayerCache::value_scale);

// What becomes of q · k before the softmax: attention/cpu/attention.h.
struct ScoreRule {
  double scale;
  float soft_cap;
  const float* bias;
  int64_t bias_reach;
  const float* sinks;
};
template <>
inline constexpr auto fields_of<ScoreRule> = std::tuple(
    &ScoreRule::scale, &ScoreRule::soft_cap, &ScoreRule::bias, &ScoreRule::bias_reach, &ScoreRule::sinks);

struct HeadCounts {
  int num_q_heads;
  int num_kv_heads;
  int head_dim;
};
template <>
inline constexpr auto fields_of<HeadCounts> =
    std::tuple(&HeadCounts::num_q_heads, &HeadCounts::num_kv_heads, &HeadCounts::head_dim);

struct Mask {
  bool causal;
  int window;  // 0: none
};
template <>
inline constexpr auto fields_of<Mask> = std::tuple(&Mask::causal, &Mask::window);

}  // namespace bequest
