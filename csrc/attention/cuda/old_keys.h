// Whether decode may read keys before the kernel that writes those of the step has ended.
//
// Each layer writes keys and values of a step before it reads them. So a prompt may share blocks as soon as
// they are planned (engine/cache), and a sequence may see what another one writes in the same step. Who
// writes to a block is its only owner, so one that is shared is full: what is looked for are blocks that one
// sequence fills in this step and another one has before its queries. It has them at the same place, and the
// blocks before it, too, but for those that one of the two has given back behind a window.
#pragma once

#include "attention/shared_prefix.h"

namespace bequest {

// Whether all keys before the queries of each sequence were in the cache before the step; false, too, where
// tables are null. REQUIRES: no sequence has more queries than tokens; these are all that write keys in the
// step, and they write those of their queries
bool has_old_keys(const BlockTableRows& rows);

}  // namespace bequest
