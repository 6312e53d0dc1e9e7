// A copy from the host's memory that is queued before its content is there: a thread of the device waits for
// a flag, then a copy engine does it. So nobody on the host has to be awake at the moment when the content is
// made and the work behind it can begin. Work of another stream waits for the copy in the same way: a stream
// that waits for an event which is late notices later still.
#pragma once

#include <cstdint>
#include <memory>

#include "device/stream.h"

struct CUevent_st;

namespace bequest::cuda {

struct LateCopyPlaces {
  const uint32_t* flag;  // in pinned memory: the content is there when it has the copy's value
  const void* source;    // in pinned memory
  void* destination;     // on the device
  uint32_t* arrived;     // on the device: has the value when the copy is done
};

// Copies between the same places, one after the other. One thread at a time.
//
// REQUIRES of each copy: somebody sets the flag (core/flag.h), and needs nothing for it from the device but
// what was queued before. It is set again only when the copy is done
class LateCopy {
 public:
  explicit LateCopy(const LateCopyPlaces& places);  // of the current device

  // Whether the copy before is done, so that the source may be written; `settle` waits for that.
  bool done() const;
  void settle();

  // What was queued on the stream so far comes before copies beside it that are queued behind this one.
  void pass(Stream stream);
  // REQUIRES: `done`
  void queue(int64_t num_bytes, uint32_t value, Stream stream);
  // The same on a stream beside `stream`: what is queued on that next waits for the copy. Who reads the
  // destination of the copy before was queued when `before` passed.
  void queue_beside(const LateCopy& before, int64_t num_bytes, uint32_t value, Stream beside, Stream stream);

 private:
  struct Free {
    void operator()(CUevent_st* event) const;
  };
  using Event = std::unique_ptr<CUevent_st, Free>;
  static Event new_event();

  void send(int64_t num_bytes, uint32_t value, Stream stream);

  LateCopyPlaces places_;
  Event passed_;
  Event copied_;
};

}  // namespace bequest::cuda
