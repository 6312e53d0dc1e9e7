// A CUDA stream without CUDA's headers, so that contracts and bindings compile where there is no toolkit.
#pragma once

struct CUstream_st;

namespace bequest {

using Stream = CUstream_st*;  // the same type as cudaStream_t; null is the default stream

}  // namespace bequest
