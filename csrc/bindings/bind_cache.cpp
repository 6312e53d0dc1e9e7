#include "bindings/bindings.h"

namespace bequest {

void bind_cache(pybind11::module_&) {}

}  // namespace bequest
