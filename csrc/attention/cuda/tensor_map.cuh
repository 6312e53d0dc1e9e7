// The cache as the copy engine sees it.
#pragma once

#include <cuda.h>

#include "cache/kv_layout.h"
#include "core/dtype.h"

namespace bequest::cuda {

// Keys and values of one layer as a tensor [NB, 2 * NKV * BS, D], in boxes of the rows of one block (64 at
// most). bf16: by 64 columns, which arrive in shared memory as rows of panels (device/warpgroup.cuh); fp8: by
// all columns, which arrive as they lie. `keys`: of the layer's head 0 in block 0, 16-byte aligned. Throws if
// the driver refuses.
CUtensorMap kv_tensor_map(const void* keys, DType dtype, const KvLayout& layout);

}  // namespace bequest::cuda
