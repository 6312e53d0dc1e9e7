#include "bindings/bindings.h"

namespace bequest {

void bind_ops(pybind11::module_&) {}

}  // namespace bequest
