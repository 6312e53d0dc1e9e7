// Block tables as Python hands them over.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "cache/block_table.h"

namespace bequest {

inline std::vector<BlockTable*> to_tables(const pybind11::sequence& tables) {
  std::vector<BlockTable*> pointers;
  pointers.reserve(tables.size());
  for (const pybind11::handle table : tables) pointers.push_back(&table.cast<BlockTable&>());
  return pointers;
}

// Batches of them, as a part of bind_cache().
void bind_batch(pybind11::module_& m);

}  // namespace bequest
