// Structs of one call that only a GPU's kernels take; bindings/tensors.h has the others.
#pragma once

#include <optional>

#include "bindings/tensors.h"
#include "model/cuda/skinny_chain.h"
#include "ops/cuda/fine_linear.h"
#include "ops/cuda/rope.h"
#include "ops/cuda/sampling.h"

namespace bequest {

inline Stream stream_of(Address stream) { return pointer<CUstream_st>(stream); }

// Token ids [T], some of them by the sampler row [num_rows] that drew them.
struct TokenIds {
  const int32_t* ids;
  int64_t num_tokens;
  const int32_t* last_tokens;  // null: none
  int64_t num_rows;
};
template <>
inline constexpr auto fields_of<TokenIds> =
    std::tuple(&TokenIds::ids, &TokenIds::num_tokens, &TokenIds::last_tokens, &TokenIds::num_rows);

// Norms of query and key heads: weights [D], to which the offset is added.
struct HeadNorm {
  const void* q_weight;
  const void* k_weight;
  float eps;
  float offset;
};
template <>
inline constexpr auto fields_of<HeadNorm> =
    std::tuple(&HeadNorm::q_weight, &HeadNorm::k_weight, &HeadNorm::eps, &HeadNorm::offset);

// A root-mean-square norm: its weight [H], to which the offset is added.
struct RmsWeight {
  const void* weight;
  float eps;
  float offset;
};
template <>
inline constexpr auto fields_of<RmsWeight> =
    std::tuple(&RmsWeight::weight, &RmsWeight::eps, &RmsWeight::offset);

struct Rotation {
  const int32_t* positions;   // [T]
  const float* cos_sin;       // [P, R]; null: none
  int64_t rotary_dim;         // R
  const float* query_scales;  // [P]; null: none
};
template <>
inline constexpr auto fields_of<Rotation> =
    std::tuple(&Rotation::positions, &Rotation::cos_sin, &Rotation::rotary_dim, &Rotation::query_scales);

// What lies between a projection and the attention.
struct Preparation {
  std::optional<HeadNorm> norm;
  Rotation rotation;
  const int64_t* slots;          // [T]
  std::optional<LayerCache> to;  // where keys and values go
};
template <>
inline constexpr auto fields_of<Preparation> =
    std::tuple(&Preparation::norm, &Preparation::rotation, &Preparation::slots, &Preparation::to);

// The parameters of prepare_qkv but for heads and strides.
inline cuda::QkvParams qkv_params(const Preparation& preparation, DType dtype) {
  const HeadNorm norm = preparation.norm.value_or(HeadNorm{});
  cuda::QkvParams params{};
  params.q_weight = norm.q_weight;
  params.k_weight = norm.k_weight;
  params.eps = norm.eps;
  params.weight_offset = norm.offset;
  params.positions = preparation.rotation.positions;
  params.cos_sin = preparation.rotation.cos_sin;
  params.rotary_dim = preparation.rotation.rotary_dim;
  params.query_scales = preparation.rotation.query_scales;
  params.slots = preparation.slots;
  params.kv_dtype = dtype;
  params.key_factor = params.value_factor = 1.0f;
  params.dtype = dtype;
  if (const auto& to = preparation.to) {
    params.kv_cache = to->cache.data;
    params.layout = to->cache.layout;
    params.layer = to->layer;
    params.kv_dtype = to->cache.dtype;
    params.key_factor = static_cast<float>(1 / to->key_scale);
    params.value_factor = static_cast<float>(1 / to->value_scale);
  }
  return params;
}

// A root-mean-square norm that is part of a product, and what it stores on its way.
struct TappedNorm {
  const void* weight;
  float eps;
  std::optional<HiddenTap> tap;
};
template <>
inline constexpr auto fields_of<TappedNorm> =
    std::tuple(&TappedNorm::weight, &TappedNorm::eps, &TappedNorm::tap);

// What a product has left for a norm, in place of it: squares [T, K / 8], and the rows before, for the tap.
struct WeighedNorm {
  const float* squares;
  float eps;
  const void* tapped;
  std::optional<HiddenTap> tap;
};
template <>
inline constexpr auto fields_of<WeighedNorm> =
    std::tuple(&WeighedNorm::squares, &WeighedNorm::eps, &WeighedNorm::tapped, &WeighedNorm::tap);

template <>
inline constexpr auto fields_of<cuda::NormAhead> = std::tuple(
    &cuda::NormAhead::gain, &cuda::NormAhead::offset, &cuda::NormAhead::rows, &cuda::NormAhead::squares);

template <>
inline constexpr auto fields_of<cuda::ChainProduct> =
    std::tuple(&cuda::ChainProduct::weight, &cuda::ChainProduct::bias, &cuda::ChainProduct::out_features,
               &cuda::ChainProduct::in_features, &cuda::ChainProduct::scales, &cuda::ChainProduct::groups,
               &cuda::ChainProduct::fine_codec);
template <>
inline constexpr ssize_t optional_fields<cuda::ChainProduct> = 1;

template <>
inline constexpr auto fields_of<cuda::FineMatrices> =
    std::tuple(&cuda::FineMatrices::codes, &cuda::FineMatrices::words, &cuda::FineMatrices::scales,
               &cuda::FineMatrices::num_matrices, &cuda::FineMatrices::out_features,
               &cuda::FineMatrices::in_features, &cuda::FineMatrices::codec);

// What a product of such matrices reads and writes: see FineLinearParams.
struct FineRows {
  const void* x;
  void* halves;
  void* out;
  float* parts;
  int64_t num_rows;

  cuda::FineLinearParams with(const cuda::FineMatrices& matrices, Address bias) const {
    return {.x = x,
            .halves = halves,
            .matrices = matrices,
            .bias = pointer<void>(bias),
            .out = out,
            .parts = parts,
            .num_rows = num_rows};
  }
};
template <>
inline constexpr auto fields_of<FineRows> =
    std::tuple(&FineRows::x, &FineRows::halves, &FineRows::out, &FineRows::parts, &FineRows::num_rows);
template <>
inline constexpr auto fields_of<cuda::ChainNorm> =
    std::tuple(&cuda::ChainNorm::weight, &cuda::ChainNorm::eps, &cuda::ChainNorm::offset);

template <>
inline constexpr auto fields_of<cuda::ChainExperts> = std::tuple(
    &cuda::ChainExperts::router, &cuda::ChainExperts::num_chosen, &cuda::ChainExperts::renormalises,
    &cuda::ChainExperts::factor, &cuda::ChainExperts::shared_up, &cuda::ChainExperts::shared_down,
    &cuda::ChainExperts::num_read, &cuda::ChainExperts::foresight, &cuda::ChainExperts::beside_attention);

// The slots of tokens, and what they hold for each product; None: nothing.
struct ChainDeltas {
  const int32_t* slots;
  std::optional<cuda::LoraSite> output, gate_up, down, next_qkv;

  cuda::ChainDeltas params() const {
    const cuda::LoraSite none{};
    return {slots, output.value_or(none), gate_up.value_or(none), down.value_or(none),
            next_qkv.value_or(none)};
  }
};
template <>
inline constexpr auto fields_of<ChainDeltas> =
    std::tuple(&ChainDeltas::slots, &ChainDeltas::output, &ChainDeltas::gate_up, &ChainDeltas::down,
               &ChainDeltas::next_qkv);

// What a layer does behind its attention, and what the next one does before its own.
struct ChainTail {
  cuda::ChainProduct output;
  cuda::ChainNorm norm;
  cuda::ChainProduct gate_up;
  Activation activation;
  cuda::ChainProduct down;
  std::optional<cuda::ChainExperts> experts;
  std::optional<ChainDeltas> deltas;
};
template <>
inline constexpr auto fields_of<ChainTail> =
    std::tuple(&ChainTail::output, &ChainTail::norm, &ChainTail::gate_up, &ChainTail::activation,
               &ChainTail::down, &ChainTail::experts, &ChainTail::deltas);

struct ChainHead {
  TappedNorm norm;
  float offset;  // of the norm's weight
  cuda::ChainProduct qkv;
  void* out;  // [T, Q]
  std::optional<cuda::ChainProduct> gate_up;
};
template <>
inline constexpr auto fields_of<ChainHead> =
    std::tuple(&ChainHead::norm, &ChainHead::offset, &ChainHead::qkv, &ChainHead::out, &ChainHead::gate_up);

// What is sampled [N]: by which rows, for which positions, and what was drafted to follow.
struct SampledRows {
  const int32_t* rows;
  const int32_t* positions;
  const int32_t* drafts;  // null: nothing was
};
template <>
inline constexpr auto fields_of<SampledRows> =
    std::tuple(&SampledRows::rows, &SampledRows::positions, &SampledRows::drafts);

// The tokens [N] that were sampled, which of them are bad, and where the host is told of them.
struct SampledTokens {
  int32_t* tokens;
  bool* bad;
  const cuda::HostTokens* told;  // null: it is not
};
template <>
inline constexpr auto fields_of<SampledTokens> =
    std::tuple(&SampledTokens::tokens, &SampledTokens::bad, &SampledTokens::told);

}  // namespace bequest
