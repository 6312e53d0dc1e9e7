// A copy from the host's memory that is queued before its content is there: a thread of the device waits for
// a flag, then a copy engine does it. So nobody on the host has to be awake at the moment when the content is
// made and the work behind it can begin. Work of another stream waits for the copy in the same way: a stream
// that waits for an event which is late notices later still.
#pragma once

#include <cstdint>

#include "device/stream.h"

namespace bequest::cuda {

struct LateCopyParams {
  const uint32_t* flag;  // in pinned memory
  uint32_t value;        // the content is there when the flag has this value
  const void* source;    // [num_bytes] in pinned memory
  void* destination;     // [num_bytes] on the device
  int64_t num_bytes;
  uint32_t* arrived;  // on the device: has the value when the copy is done
};

// REQUIRES: somebody sets the flag, and needs nothing for it from the device but what was queued before. It
// is set again only when the copy is done.
void late_copy(const LateCopyParams& p, Stream stream);

// What is queued next waits until a flag, on the device or in pinned memory, has the value. REQUIRES: as
// above
void wait_for_flag(const uint32_t* flag, uint32_t value, Stream stream);

// Sets a flag: what this thread wrote before is seen by whoever sees the value.
void publish(uint32_t* flag, uint32_t value);

}  // namespace bequest::cuda
