// Copies whole blocks, all layers of a block as one span: copy on write inside one cache, swaps between two.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bequest {

struct BlockCopyParams {
  const void* source;  // [source_blocks, block_bytes]
  void* destination;   // [destination_blocks, block_bytes]; may be `source`
  int64_t source_blocks;
  int64_t destination_blocks;
  size_t block_bytes;
  const int32_t* pairs;  // [C, 2] (source block, destination block)
  int64_t num_pairs;
};

// The copies of one call have no order. Throws before anything is copied if a block is out of range, if a
// destination occurs twice, or if, inside one cache, a destination is also a source.
void copy_blocks(const BlockCopyParams& p);

}  // namespace bequest
