// The two passes of paged attention, per instruction set: attend one item, merge the splits of one tile.
#pragma once

#include "attention/cpu/attention.h"
#include "attention/cpu/scratch.h"
#include "core/isa.h"

namespace bequest {

// One query tile and kv head, with everything the plan knows about them.
struct AttendJob {
  const AttentionShape* shape;
  const QueryTile* tile;
  const int32_t* blocks;  // [ceil(seq_len / BS)]
  int head;               // of NKV
  int padded_dim;         // of the accumulators: D rounded up to 16

  int num_rows() const { return tile->num_tokens * shape->group(); }
};

// Attends the tile's rows to the keys of splits [split_begin, split_end). Writes rows of p.out if `partials`
// is null; otherwise leaves one StateRows per split there, one after another.
BEQUEST_DECLARE_PER_ISA(void attend(const PagedAttentionParams& p, const AttendJob& job, int split_begin,
                                    int split_end, float* scratch, float* partials))

// Merges the states of the splits that the tile shares, then those of its own, in order, and writes the
// tile's rows of p.out.
BEQUEST_DECLARE_PER_ISA(void merge_splits(const PagedAttentionParams& p, const AttendJob& job,
                                          const SplitStates& shared, const SplitStates& own, float* scratch))

// States of a job's rows: made empty, merged into others, and made the tile's rows of p.out.
BEQUEST_DECLARE_PER_ISA(void clear_states(const AttendJob& job, StateRows states))
BEQUEST_DECLARE_PER_ISA(void merge_states(const AttendJob& job, StateRows all, StateRows part))
BEQUEST_DECLARE_PER_ISA(void write_result(const PagedAttentionParams& p, const AttendJob& job, StateRows all))

// Attends in products of bfloat16. REQUIRES: current_isa() is kAmx; p.scale > 0
namespace amx {
void attend(const PagedAttentionParams& p, const AttendJob& job, int split_begin, int split_end,
            float* scratch, float* partials);

#if defined(__x86_64__)
// States are float32 there too.
using avx512::clear_states;
using avx512::merge_states;
using avx512::write_result;
#endif
}  // namespace amx

}  // namespace bequest
