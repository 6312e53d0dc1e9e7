// Moves the tables of one request between the device pool and a host pool, all of them or none.
//
// A table is named once. The copies they return are made by the next step before its other copies, outward
// ones first: within one plan, swap out before anything is swapped in or prepared for writing in the same
// tables.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "cache/block_table.h"

namespace bequest {

// Blocks that the tables hold, in both pools; one that several of them share counts once.
int64_t count_distinct_blocks(const std::vector<BlockTable*>& tables);

// Moves the blocks that nobody but `tables` holds to `host` and returns (device, host) pairs, or does nothing
// and returns nullopt if they do not fit. A block shared with others stays where it is; one that is shared
// among `tables` moves once and stays shared. What is left behind on the device is findable until it is
// reused.
std::optional<std::vector<BlockCopy>> try_swap_out(const std::vector<BlockTable*>& tables,
                                                   const std::shared_ptr<BlockPool>& host);

// The same for as many of those blocks as fit, and not more than `most`; the last ones of the tables go
// first. What this plan writes or swaps in stays.
std::vector<BlockCopy> swap_out_some(const std::vector<BlockTable*>& tables,
                                     const std::shared_ptr<BlockPool>& host, int64_t most);

// Brings every host block of `tables` to `device`, their pool, and returns (host, device) pairs, or does
// nothing and returns nullopt if they do not fit. A host block that others hold too stays there for them.
std::optional<std::vector<BlockCopy>> try_swap_in(const std::vector<BlockTable*>& tables,
                                                  const std::shared_ptr<BlockPool>& device);

}  // namespace bequest
