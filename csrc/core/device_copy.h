// A copy between pinned memory and the device, queued on a stream.
#pragma once

#include <cstddef>

#include "core/stream.h"

namespace bequest::cuda {

void copy_async(void* to, const void* from, size_t bytes, Stream stream);

}  // namespace bequest::cuda
