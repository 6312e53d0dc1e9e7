#include "bindings/bindings.h"

namespace bequest {

void bind_sampling(pybind11::module_&) {}

}  // namespace bequest
