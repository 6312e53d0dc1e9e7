// The work of one step's attention on a GPU, as data: a flat int32 buffer that the host writes and a fixed
// grid walks.
//
// The queries of a sequence are cut into tiles (query tokens × heads of one kv head's group = rows), the keys
// a tile sees into units of kUnitKeys. An item is a tile with a range of its units, for every kv head: the
// list knows nothing of heads. Two sections, for two kernels, so that lengths from 1 to 64k in one batch
// leave no tail in either:
//
// "decode" has the tiles of at most kDecodeRows rows. All their units stand in one line, weighted with their
// cost, and the line is cut into equal parts, one per worker, wherever the cuts fall. A worker is NKV thread
// blocks, one per head, which walk the same items.
//
//   tiles     |------- A -------|-- B --|-C-|--------------- D ---------------|
//   workers   |----- 0 -----|----- 1 -----|----- 2 -----|----- 3 -----|--- 4 ---|
//   items      A[0,13)       A[13,17) B C[0,1) ...
//
// "prefill" has the other tiles, cut only where one is more than half a worker's share, and sorted, large
// ones first, those of like length by sequence. Ticket t of the kernel is item t / NKV for head t % NKV. A
// thread block begins with the ticket of its own number and draws further ones from a counter, which evens
// out what no estimate of cost foresees.
//
// A whole tile is written to the output; a tile that is cut leaves one partial softmax state {o, m, d} per
// piece, and a merge entry says which states make which rows.
//
// Sequences that share their first blocks (shared_prefix.h) have these keys in tiles of their own: the query
// tokens of all of them, the block table of the first, and a first_position past kv_end, from which no key is
// masked. What is left of each sequence is its tail. Both leave states, and the merge entry of a tail names
// those of the shared tile too. Who reads a shared tile depends on how many keys there are:
//   few    "wide" tiles of the decode section, cut into single units: as many rows as a prefill tile has, but
//          latency is all that counts. They are the only items of the first workers, the line is dealt to
//          the others. Where all else is many tails of few units, these are "narrow" items, dealt to warps;
//   more   prefill tiles, where the keys would be read so often that this costs more than a kernel;
//   else   decode tiles, whose rows are then all in use.
//
// Where tails are few, or many and short behind prefill tiles, no merge is needed: whoever attends to a tail
// waits for the states of the wide or prefill tile, joins them to its own, which never leaves the chip, and
// writes the rows. The pieces of a wide tile count themselves on a counter of the tile; those of a prefill
// tile are there when its kernel has ended. Wide tiles wait for nobody, so nobody waits in a circle. Where
// tails are narrow, their states and those of the wide tiles go to the mailbox (mailbox.cuh), and all warps
// take part in joining the rows.
#pragma once

#include <cstdint>

#include "attention/cuda/work_codes.h"
#include "attention/shared_prefix.h"
#include "core/dtype.h"

namespace bequest {

inline constexpr int kDecodeRows = 16;  // one tensor-core tile
inline constexpr int kUnitKeys = 64;
// States of a wide tile that a tail reads about as soon as a kernel of its own would, and that a narrow one
// does.
inline constexpr int kMostJoined = 12;
inline constexpr int kMostMailed = 32;

struct WorkItem {
  int32_t sequence;        // whose block table holds the keys
  int32_t first_token;     // query tokens [first_token, first_token + num_tokens) of the step
  int32_t num_tokens;      // 0: a worker without work
  int32_t first_position;  // of a wide tile's piece that somebody waits for: counted_position()
  int32_t kv_begin;        // keys [kv_begin, kv_end) of the sequence; kv_begin lies in the piece's first unit
  int32_t kv_end;
  ResultPlace result;  // the state of a wide tile beside narrow items is in the mailbox
  MaybeIndex next;     // decode: the worker's next item. The first item of worker w is item w.
};

// Rows of `num_tokens` query tokens: state i of num_states begins at state_row + i * rows, and behind these
// state i of num_shared at shared_row + i * shared_stride.
struct MergeEntry {
  int32_t first_token;
  int32_t num_tokens;
  int32_t state_row;
  int32_t num_states;
  int32_t shared_row;
  int32_t num_shared;
  int32_t shared_stride;
  int32_t unused;
};

// The states that a tail joins to its own: num_states of them, the i-th at state_row + i * stride. In the
// section of the merges, but not counted among them.
struct JoinEntry {
  int32_t state_row;
  int32_t num_states;
  int32_t stride;
  MaybeIndex counter;   // that counts them; none: they are there when the grid ahead has ended
  int32_t num_readers;  // tails that wait for the same counter; the last of them sets it back
  // Of a narrow tail, whose entry is as far from the section's end as its item from the first:
  int32_t tail_row;  // where its own state begins in the mailbox
  int32_t token;
  int32_t unused;
};

// Tickets that the prefill kernel draws, before the counters of wide tiles.
inline constexpr int kDrawnTickets = 2;

struct WorkListHeader {
  int32_t num_merges;
  int32_t num_decode_items;  // with the empty ones of workers without work; 0: no work at all
  int32_t num_prefill_items;
  int32_t num_state_rows;
  // Items that a single warp attends to, one after another in the decode section, for the warps of the
  // workers behind those with wide tiles, in turns; these have no other work.
  int32_t first_narrow_item;
  int32_t num_narrow_items;
  int32_t num_wide_workers;  // the first ones, which have wide tiles and nothing else
  // The narrow items are for the warps from this worker on, join states of prefill tiles by themselves, and
  // those of one warp are linked. The workers before it have all else. None: narrow items send mail.
  MaybeIndex first_joining = MaybeIndex::none();
  // Whether all keys before the queries of each sequence were in the cache before this step. If not, a
  // sequence sees a block that another one fills in it: a prompt may share blocks as soon as they are
  // planned. 0 also where nobody looked: with prefill tiles, or without block tables.
  int32_t keys_are_old;
  int32_t unused[3];
};

// What is fixed when an engine starts. Everything about the buffer's size follows from it.
struct WorkShape {
  int num_q_heads;
  int num_kv_heads;
  int head_dim;
  DType dtype;  // kF32: one kernel for all tiles, which are never cut, so that a row's result depends on
                // nothing else
  bool causal;
  int window;  // a query at p sees keys in (p - window, p]; 0: all. REQUIRES: causal if not 0
  int num_multiprocessors;
  int64_t max_sequences;
  int64_t max_tokens;
  int prefill_blocks_per_sm = 2;  // thread blocks of the prefill kernel that are under way at once
  bool wide_tiles = true;         // whether the decode kernel knows them

  int group() const { return num_q_heads / num_kv_heads; }
};

// Where the sections lie (in int32 from the start of the buffer) and how large everything is.
struct WorkListLayout {
  int blocks;          // thread blocks of a grid that fills the device
  int workers;         // of them per kv head
  int decode_tokens;   // most query tokens of a decode tile; 0: a single token has too many rows
  int prefill_tokens;  // likewise; 0: no prefill tile can be
  int wide_workers;    // most workers that have wide tiles; there are no more such tiles
  int ticket_ints;     // int32 of counters: kDrawnTickets, then [wide tiles, NKV]
  int max_decode_merges;
  int max_prefill_merges;
  int64_t merges;
  int64_t decode_items;
  int64_t prefill_items;
  int64_t size;        // of the whole buffer
  int mail_rows;       // of the mailbox
  int64_t state_rows;  // scratch is [state_rows, NKV, D] for o and [state_rows, NKV, 2] for {m, d}
};

// Thread blocks per multiprocessor and rows of a prefill tile, which the kernels are compiled for.
inline constexpr int kBroadHead = 512;  // head_dim of kernels of their own, without shared or wide tiles
constexpr int attention_blocks_per_sm(int head_dim) { return head_dim <= 128 ? 2 : 1; }
constexpr int prefill_tile_rows(int head_dim) { return head_dim <= 128 ? 128 : 64; }

// Throws on a shape no kernel serves.
WorkListLayout work_list_layout(const WorkShape& shape);

// Writes the list to `buffer` (layout.size int32; what no item fills stays as it is). A sequence's query i is
// at position seq_len - query_len + i; one with seq_len 0 is padding. Throws if the batch is larger than the
// shape allows or its lengths are inconsistent.
WorkListHeader build_work_list(const WorkShape& shape, const WorkListLayout& layout,
                               const BlockTableRows& batch, int32_t* buffer);

}  // namespace bequest
