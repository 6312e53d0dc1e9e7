#include "attention/cuda/tensor_map.cuh"

#include <algorithm>
#include <cstdint>

#include "attention/cuda/work_list.h"
#include "device/tensor_map.cuh"

namespace bequest::cuda {

CUtensorMap kv_tensor_map(const void* keys, DType dtype, const KvLayout& layout) {
  const bool is_fp8 = dtype == DType::kF8E4M3;
  const cuuint64_t element = is_fp8 ? 1 : 2;
  const cuuint32_t columns = is_fp8 ? static_cast<cuuint32_t>(layout.head_dim) : 64;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(layout.head_dim),
                              static_cast<cuuint64_t>(2 * layout.num_kv_heads * layout.block_size),
                              static_cast<cuuint64_t>(layout.num_blocks)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(layout.head_dim) * element,
                                static_cast<cuuint64_t>(layout.block_stride()) * element};
  const cuuint32_t box[] = {columns, static_cast<cuuint32_t>(std::min<int64_t>(layout.block_size, kUnitKeys)),
                            1};
  const cuuint32_t steps[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      tensor_map_encoder()(&map, is_fp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3,
                           const_cast<void*>(keys), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                           is_fp8 ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS, "the driver refused the tensor map of the cache");
  return map;
}

}  // namespace bequest::cuda
