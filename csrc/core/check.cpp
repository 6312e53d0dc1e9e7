#include "core/check.h"

#include <string>

namespace bequest {

void fail(std::string_view message, std::source_location where) {
  std::string_view file = where.file_name();
  if (const auto root = file.rfind("csrc/"); root != std::string_view::npos) file.remove_prefix(root);
  throw Error(std::string(message) + " (" + std::string(file) + ":" + std::to_string(where.line()) + ")");
}

}  // namespace bequest
