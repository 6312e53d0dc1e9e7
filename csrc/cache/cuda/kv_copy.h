// Copies of whole blocks, all layers of a block as one span: copy on write inside the device's cache, swaps
// between it and pinned host memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/stream.h"

namespace bequest::cuda {

struct BlockCopyParams {
  void* cache;  // [NB, block_bytes]
  int64_t num_blocks;
  size_t block_bytes;    // a multiple of 16
  const int32_t* pairs;  // [C, 2] (source, destination) in device memory; a source of -1 is skipped
  int64_t num_pairs;
};

// One launch. The copies have no order. REQUIRES: no destination twice, none that is also a source.
void copy_blocks(const BlockCopyParams& p, Stream stream);

struct BlockSwapParams {
  const void* source;  // [source_blocks, block_bytes], device or pinned host
  void* destination;   // [destination_blocks, block_bytes], likewise
  int64_t source_blocks;
  int64_t destination_blocks;
  size_t block_bytes;
  const int32_t* pairs;  // [C, 2] (source, destination) in host memory, read before this returns
  int64_t num_pairs;
};

// Asynchronous copies by the copy engines, so that no multiprocessor is taken from the step beside them. A
// block is a span of a megabyte or more: one call each costs less than the bus does. Throws before the first
// copy if a block is out of range.
void swap_blocks(const BlockSwapParams& p, Stream stream);

// Any bytes, between pinned host memory and the device's: torch's own way to this call takes longer than it.
// A few are copied by threads, with what runs on the multiprocessors.
void copy_bytes(void* destination, const void* source, size_t num_bytes, Stream stream);

}  // namespace bequest::cuda
