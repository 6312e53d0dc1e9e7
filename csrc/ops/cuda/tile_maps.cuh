// W, x and the words of groups as the copy engine sees them in tile_linear.cuh. What lies beyond an end
// arrives as zeros.
#pragma once

#include "device/tensor_map.cuh"
#include "ops/cuda/skinny_linear.h"
#include "ops/cuda/tile_sums.cuh"

namespace bequest::cuda::tiles {

struct Maps {
  CUtensorMap weight, rows, words;
};

inline CUtensorMap encode(const void* data, CUtensorMapDataType type, CUtensorMapSwizzle swizzle,
                          cuuint32_t rank, const cuuint64_t* sizes, const cuuint64_t* strides,
                          const cuuint32_t* box) {
  const cuuint32_t steps[] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = tensor_map_encoder()(&map, type, rank, const_cast<void*>(data), sizes, strides, box,
                                               steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, kLineFetch,
                                               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS, "the driver refused the tensor map of a product");
  return map;
}

// Rows of W, of a gated product half of the gate and half of up.
inline CUtensorMap weight_map(const void* weight, int64_t out_features, int64_t row_bytes, int tile_rows,
                              bool gated) {
  const cuuint64_t halves = gated ? 2 : 1, rows = static_cast<cuuint64_t>(out_features) / halves;
  const auto bytes = static_cast<cuuint64_t>(row_bytes);
  const cuuint64_t sizes[] = {bytes / 2, rows, halves, 1},
                   strides[] = {bytes, rows * bytes, halves * rows * bytes};
  const cuuint32_t box[] = {kLineBytes / 2,
                            static_cast<cuuint32_t>(tile_rows) / static_cast<cuuint32_t>(halves),
                            static_cast<cuuint32_t>(halves), 1};
  return encode(weight, CU_TENSOR_MAP_DATA_TYPE_UINT16, CU_TENSOR_MAP_SWIZZLE_128B, 4, sizes, strides, box);
}

// 32 words of a row for each 4096 of k.
inline CUtensorMap words_map(const void* words, int64_t out_features, int64_t in_features, int tile_rows,
                             bool gated) {
  const cuuint64_t halves = gated ? 2 : 1, rows = static_cast<cuuint64_t>(out_features) / halves;
  const auto bytes = static_cast<cuuint64_t>(ceil_div(in_features, 4096)) * 128;
  const cuuint64_t sizes[] = {bytes / 4, rows, halves, 1},
                   strides[] = {bytes, rows * bytes, halves * rows * bytes};
  const cuuint32_t box[] = {kWordBytes / 4,
                            static_cast<cuuint32_t>(tile_rows) / static_cast<cuuint32_t>(halves),
                            static_cast<cuuint32_t>(halves), 1};
  return encode(words, CU_TENSOR_MAP_DATA_TYPE_UINT32, CU_TENSOR_MAP_SWIZZLE_NONE, 4, sizes, strides, box);
}

// Rows of x in lines of 128 bytes.
template <class Size>
CUtensorMap rows_map(const SkinnyLinearParams& p) {
  constexpr int kLine = Size::Format::kLine;
  const auto lines = static_cast<cuuint64_t>(p.in_features) / kLine;
  const cuuint64_t sizes[] = {kLine, static_cast<cuuint64_t>(p.num_tokens), lines},
                   strides[] = {lines * kLineBytes, kLineBytes};
  const cuuint32_t box[] = {kLine, Size::kTokens, Size::kBatches};
  return encode(p.x, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_SWIZZLE_128B, 3, sizes, strides, box);
}

template <class Size>
Maps maps_of(const SkinnyLinearParams& p) {
  const bool gated = p.result == SkinnyResult::kGate;
  const int64_t row_bytes = p.in_features * kLineBytes / Size::Format::kUnit;
  Maps maps{weight_map(p.weight, p.out_features, row_bytes, Size::kRows, gated), rows_map<Size>(p), {}};
  if constexpr (Size::Format::kGrouped)
    maps.words = words_map(p.groups, p.out_features, p.in_features, Size::kRows, gated);
  return maps;
}

}  // namespace bequest::cuda::tiles
