// The cache as the copy engine sees it.
#pragma once

#include <cuda.h>

#include "cache/kv_layout.h"

namespace bequest::cuda {

// Keys and values of one layer, bf16, as a tensor [NB, 2 * NKV * BS, D], in boxes of the rows of one block
// (64 at most) by 64 columns, which arrive in shared memory as rows of panels (device/warpgroup.cuh). `keys`:
// of the layer's head 0 in block 0, 16-byte aligned. Throws if the driver refuses.
CUtensorMap kv_tensor_map(const void* keys, const KvLayout& layout);

}  // namespace bequest::cuda
