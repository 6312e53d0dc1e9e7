// A word by which one thread tells another, on the host or on a device, that what it wrote is there.
#pragma once

#include <atomic>
#include <cstdint>

namespace bequest {

// What this thread wrote before is seen by whoever sees the value.
inline void publish(uint32_t* flag, uint32_t value) {
  std::atomic_ref<uint32_t>(*flag).store(value, std::memory_order_release);
}

}  // namespace bequest
