// y = x Wᵀ + b for a few rows of x, where reading W is all the work; a norm before it and what a layer does
// with the result are part of it.
#pragma once

#include <cstdint>

#include "device/stream.h"
#include "ops/activation.h"
#include "ops/hidden_tap.h"

namespace bequest::cuda {

inline constexpr int kMostStreamedRows = 4, kMostFusedRows = 16;
inline constexpr int kMostSkinnyRows = 32;
inline constexpr int kSkinnyDepthUnit = 256;  // 32 accesses of 8 bfloat16
inline constexpr int kSkinnyCodesUnit = 512;  // 32 accesses of 16 codes

enum class SkinnyResult {
  kStore,  // out = y
  kAdd,    // out += y, where out is the residual of a layer
  kGate,   // out = f(gate) * up, where W has the rows of the gate and then those of up
};

// What a product that adds to the stream leaves for the norm that reads it next: that norm is then no pass of
// its own. Of tile_linear alone.
struct NormAhead {
  const void* gain = nullptr;  // [N] bfloat16, aligned to 4 bytes; null: nothing is left
  float offset = 0;            // added to the gain
  void* rows = nullptr;        // [T, N] bfloat16, aligned to 4 bytes: the sums times the gain
  float* squares = nullptr;    // [T, N / 8]: the squares of eight neighbouring sums each, added
};

struct SkinnyLinearParams {
  const void* x;       // [T, K] bfloat16, contiguous, aligned to 16 bytes
  const void* weight;  // [N, K] bfloat16, or e4m3 where there are scales; contiguous, aligned to 16 bytes
  const void* bias;    // [N] bfloat16, or null
  void* out;           // [T, N] bfloat16; kGate: [T, N / 2]
  int num_tokens;      // T
  int64_t out_features;
  int64_t in_features;
  SkinnyResult result = SkinnyResult::kStore;
  Activation activation = Activation::kSilu;  // of kGate
  // The rest is of a root-mean-square norm of x before the product; null: none.
  const void* norm_weight = nullptr;  // [K] bfloat16, aligned to 16 bytes
  float eps = 0;
  HiddenTap tap = {};             // of x as it is before the norm; not `store_output`
  const float* scales = nullptr;  // [N]: what each row of codes is multiplied by; null: W is in numbers
  // [N, G] words of codes of 4 bits, see CodeGroup; G: K / 128, filled up to a multiple of 32. Of tile_linear
  // alone
  const uint32_t* groups = nullptr;
  const float* x_scales = nullptr;  // [T]: x is in e4m3, and so is W; null: in bfloat16. Of tile_linear alone
  NormAhead ahead = {};             // of kAdd
  // x is what has been left so for a norm: its squares [T, K / 8], aligned to 16 bytes, and the rows [T, K]
  // that the tap sees. Then there is no norm_weight. Of tile_linear alone
  const float* squares = nullptr;
  const void* tapped = nullptr;
};

// Whether a norm can be part of a product of rows [T, K].
bool skinny_linear_norms(int num_tokens, int64_t in_features);

// A row's result depends on the row alone, and on whether there are more than kMostStreamedRows, and more
// than kMostFusedRows. REQUIRES: 1 <= T <= kMostSkinnyRows; K is a multiple of kSkinnyDepthUnit; beyond
// kMostFusedRows kStore and no norm; a norm where skinny_linear_norms; of codes T <= kMostStreamedRows and K
// is a multiple of kSkinnyCodesUnit.
void skinny_linear(const SkinnyLinearParams& p, Stream stream);

}  // namespace bequest::cuda
