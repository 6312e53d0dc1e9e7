#include "attention/cuda/tensor_map.cuh"

#include <algorithm>
#include <cstdint>

#include "attention/cuda/work_list.h"
#include "device/tensor_map.cuh"

namespace bequest::cuda {
namespace {

struct Boxes {
  cuuint64_t sizes[3];
  cuuint64_t strides[2];  // bytes
  cuuint32_t box[3];
};

// Of bytes as they lie, or of bf16 in rows of panels.
CUtensorMap map_of(const void* data, const Boxes& boxes, bool are_bytes) {
  const cuuint32_t steps[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result = tensor_map_encoder()(
      &map, are_bytes ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3,
      const_cast<void*>(data), boxes.sizes, boxes.strides, boxes.box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      are_bytes ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS, "the driver refused a tensor map of the attention");
  return map;
}

CUtensorMap cache_map(const void* keys, DType dtype, const KvLayout& layout) {
  const bool is_fp8 = dtype == DType::kF8E4M3;
  const int64_t element = is_fp8 ? 1 : 2;
  const int64_t columns = is_fp8 ? layout.head_dim : 64, rows = 2 * layout.num_kv_heads * layout.block_size;
  const Boxes boxes{
      .sizes = {cuuint64_t(layout.head_dim), cuuint64_t(rows), cuuint64_t(layout.num_blocks)},
      .strides = {cuuint64_t(layout.head_dim * element), cuuint64_t(layout.block_stride() * element)},
      .box = {cuuint32_t(columns), cuuint32_t(std::min<int64_t>(layout.block_size, kUnitKeys)), 1}};
  return map_of(keys, boxes, is_fp8);
}

// Queries or results: [T, NQ, D] with this stride of a token.
CUtensorMap row_map(const void* data, int64_t stride, const CudaAttentionParams& p, int group) {
  const int64_t head_bytes = p.layout.head_dim * 2;
  const Boxes boxes{
      .sizes = {cuuint64_t(p.layout.head_dim), cuuint64_t(p.num_q_heads), cuuint64_t(p.num_tokens)},
      .strides = {cuuint64_t(head_bytes), cuuint64_t(stride * 2)},
      .box = {64, cuuint32_t(group), cuuint32_t(kQueryBoxRows / group)}};
  return map_of(data, boxes, false);
}

}  // namespace

PrefillMaps prefill_maps(const CudaAttentionParams& p, const void* keys) {
  const int group = p.num_q_heads / static_cast<int>(p.layout.num_kv_heads);
  PrefillMaps maps{.cache = cache_map(keys, p.kv_dtype, p.layout), .queries = {}, .results = {}};
  if (!has_query_boxes(group)) return maps;
  maps.queries = row_map(p.q, p.q_stride, p, group);
  if (p.kv_dtype == DType::kF8E4M3)
    maps.results = row_map(p.out, p.num_q_heads * p.layout.head_dim, p, group);
  return maps;
}

}  // namespace bequest::cuda
