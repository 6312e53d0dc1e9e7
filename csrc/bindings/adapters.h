#pragma once

#include <pybind11/pybind11.h>

namespace bequest {

// What adapters add, and to which rows: a part of what the stack is told of a step.
void bind_adapters(pybind11::module_& m);

}  // namespace bequest
