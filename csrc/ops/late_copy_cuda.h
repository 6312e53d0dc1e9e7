// A copy from the host's memory that is queued before its content is there: the device waits for a flag. So
// nobody on the host has to be awake at the moment when the content is made and the work behind it can begin.
#pragma once

#include <cstdint>

#include "core/stream.h"

namespace bequest::cuda {

struct LateCopyParams {
  const uint32_t* flag;  // in pinned memory
  uint32_t value;        // the content is there when the flag has this value
  const void* source;    // [num_bytes] in pinned memory, on a multiple of 16 bytes
  void* destination;     // [num_bytes] on the device, the same
  int64_t num_bytes;     // a multiple of 16
};

// REQUIRES: somebody sets the flag, and needs nothing for it from the device but what was queued before.
void late_copy(const LateCopyParams& p, Stream stream);

// Sets a flag: what this thread wrote before is seen by whoever sees the value.
void publish(uint32_t* flag, uint32_t value);

}  // namespace bequest::cuda
