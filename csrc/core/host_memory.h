// How the process uses the host's memory.
#pragma once

#include <cstddef>

namespace bequest {

// Makes malloc keep what is freed. A step frees its activations and the next one takes as much again; by
// default glibc gives large blocks back to the kernel, and every step would pay for their pages anew.
void keep_freed_memory();

// Asks for large pages under [address, address + bytes), before it is touched: streaming hundreds of
// megabytes of weights in pages of 4 KiB is slowed by address translation. A wish, not a demand.
void advise_large_pages(void* address, size_t bytes);

// Gives the pages that begin in [address, address + bytes) their memory, as writing to them would, and leaves
// their content alone: others may use them meanwhile. False where the system cannot.
bool populate_pages(void* address, size_t bytes);

}  // namespace bequest
