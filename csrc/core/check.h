// Errors of the core. One exception type crosses into Python (engine._C.Error), with the place that found the
// fault.
#pragma once

#include <source_location>
#include <stdexcept>
#include <string>
#include <string_view>

namespace bequest {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void fail(std::string_view message,
                              std::source_location where = std::source_location::current()) {
  std::string_view file = where.file_name();
  if (const auto root = file.rfind("csrc/"); root != std::string_view::npos) file.remove_prefix(root);
  throw Error(std::string(message) + " (" + std::string(file) + ":" + std::to_string(where.line()) + ")");
}

// `message` is a plain literal: build dynamic text behind an `if (!ok) fail(...)` so that the good path stays
// free.
inline void check(bool ok, std::string_view message,
                  std::source_location where = std::source_location::current()) {
  if (!ok) [[unlikely]]
    fail(message, where);
}

}  // namespace bequest
