#include "bindings/bindings.h"

namespace bequest {

void bind_attention(pybind11::module_&) {}

}  // namespace bequest
