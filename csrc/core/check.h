// Errors of the core. One exception type crosses into Python (engine._C.Error), with the place that found the
// fault.
#pragma once

#include <source_location>
#include <stdexcept>
#include <string_view>

namespace bequest {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Out of line, so that a *.simd.cpp that checks something emits no shared code (see core/isa.h).
[[noreturn]] void fail(std::string_view message,
                       std::source_location where = std::source_location::current());

// `message` is a plain literal: build dynamic text behind an `if (!ok) fail(...)` so that the good path stays
// free.
[[gnu::always_inline]] inline void check(bool ok, std::string_view message,
                                         std::source_location where = std::source_location::current()) {
  if (!ok) [[unlikely]]
    fail(message, where);
}

}  // namespace bequest
