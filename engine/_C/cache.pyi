"""Blocks and their tables: block_pool.h, block_table.h, beam_tables.h, swap.h and batch.h of csrc/cache are the
contracts."""

from collections.abc import Iterable, Sequence
from typing import Final, overload

import numpy as np
import numpy.typing as npt

from .core import Ids, Ints, Pairs, Strips
from .progress import Progress

class TokenList:  # token ids of a sequence, each in [0, 2^31)
    def __init__(self, tokens: Iterable[int] = ()) -> None: ...
    def append(self, token: int) -> None: ...
    def extend(self, tokens: Iterable[int]) -> None: ...  # all or nothing
    def truncate(self, num_tokens: int) -> None: ...  # Error if the list is shorter
    def common_prefix(self, other: TokenList) -> int: ...  # tokens at the beginning that both have in common
    def fork(self, more: Ids = ()) -> TokenList: ...  # a copy, with more tokens behind it
    def to_list(self) -> list[int]: ...
    def array(self) -> Ints: ...  # a copy
    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

class NgramIndex:  # where runs of n tokens or more came before in a text that grows
    def __init__(self, n: int) -> None: ...
    def learn(self, tokens: TokenList) -> None: ...  # what it has beyond what is known; Error if it is shorter
    # Behind the longest run that `tokens` ends with, the latest of equal ones
    def follow(self, tokens: TokenList, most: int) -> tuple[int, ...]: ...
    def run(self, tokens: TokenList) -> int: ...  # how long that run is; 0 if there is none
    def __len__(self) -> int: ...  # of the text

class SuffixIndex:  # the same of the latest `most` tokens of many texts; `most` is a power of two above n
    def __init__(self, n: int, most: int) -> None: ...
    def learn(self, tokens: TokenList, begin: int = 0) -> tuple[int, int]: ...  # where its text begins and ends
    def forget(self, begin: int, end: int) -> None: ...
    def follow(self, tokens: TokenList, most: int) -> tuple[int, ...]: ...  # to the end of a text at most
    def run(self, tokens: TokenList) -> int: ...
    def __len__(self) -> int: ...  # tokens it keeps, and a mark behind each text

class BlockPool:  # block 0, the null block, is never handed out; a freed one stays findable until it is reused
    # hash_bits below 32 make collisions in the prefix index likely, for tests
    def __init__(
        self, num_blocks: int, block_size: int, prefix_index: bool = True, hash_bits: int = 32, strips: Strips = ...
    ) -> None: ...
    windows: Final[list[int]]
    num_strips: Final[int]  # blocks that hold the same tokens
    num_whole_strips: Final[int]  # those of them that keep all tokens
    slides: Final[bool]  # whether others do not
    # The most blocks that a lease of so many tokens holds of strips with windows.
    def most_leased_of_windows(self, num_tokens: int, num_prompt: int) -> int: ...
    num_blocks: Final[int]  # with the null block
    block_size: Final[int]
    num_free: Final[int]
    num_used: Final[int]  # num_blocks - 1 - num_free
    usage: Final[float]  # num_used as a part of what is usable
    num_indexed: Final[int]  # nodes of the prefix index: of a row of blocks each
    num_roots: Final[int]  # salts that have blocks there
    def indexed_blocks(self) -> Ints: ...  # [N, 2]: blocks in the prefix index, and the strip of each; O(num_blocks)
    def ref_count(self, block: int) -> int: ...
    def epoch(self, block: int) -> int: ...  # counts how often the block's content was replaced
    # Leading slots that a copy of the open plan may read: its forward and its copies leave them alone.
    def settled_slots(self, block: int) -> int: ...
    # Takes a reference if the block, free or in use, still holds what it held at `epoch`.
    def try_revive(self, block: int, epoch: int) -> bool: ...
    def release(self, block: int) -> None: ...  # gives a reference back
    # Until end_plan() what a reported copy or swap-in reads is not handed out again. What is prepared for writing is
    # not copied: match_partial() passes it over, a write that would copy it is an Error.
    def begin_plan(self) -> None: ...
    def end_plan(self) -> None: ...
    def clear_index(self) -> None: ...  # forgets all prefixes; content and references stay
    def check(self) -> None: ...  # Error naming the first broken invariant; O(num_blocks)

class BlockEpochs:  # (block, epoch) of entries that a table once had, in order; a sequence of pairs serves as one
    def __init__(self, pairs: Sequence[tuple[int, int]] = ()) -> None: ...
    # Those that still hold what they held, up to where nobody can continue from.
    def num_left(self, pool: BlockPool) -> int: ...
    def num_held(self, pool: BlockPool) -> int: ...  # those of them that somebody owns
    def blocks_left(self, pool: BlockPool) -> Ints: ...  # as many blocks as num_left
    def __len__(self) -> int: ...
    def __getitem__(self, i: int) -> tuple[int, int]: ...

class BlockTable:  # of one sequence, freed when it is collected; the salt divides the prefix index, compared exactly
    def __init__(self, pool: BlockPool, salt: bytes = b"") -> None: ...
    @staticmethod  # a table of the unbroken beginning of `blocks` that is still there; windows may have gaps
    def adopt(pool: BlockPool, salt: bytes, blocks: BlockEpochs | Sequence[tuple[int, int]]) -> BlockTable: ...
    # What it keeps of its windows: what the next token sees; and what leases keep; everything.
    def keep_window(self) -> None: ...
    def keep_for_lease(self, num_prompt: int) -> None: ...
    def keep_all(self) -> None: ...
    def slide(self, position: int) -> None: ...  # gives back what a sequence that goes on there does not keep
    def servable(self, limit: int) -> int: ...  # the most tokens up to it behind which a sequence can go on
    def copyable(self, num_tokens: int) -> int: ...  # of them, those that end in slots that a plan may copy
    # On an empty table: takes the indexed full rows of tokens[:limit]; returns the tokens they cover.
    def match_prefix(self, tokens: TokenList, limit: int) -> int: ...
    # Then: takes the block that shares the longest head with the tokens that follow; the head's length, 0: nothing.
    def match_partial(self, tokens: TokenList, limit: int) -> int: ...
    def blocks_needed(self, begin: int, end: int) -> int: ...  # that try_prepare_write(begin, end) would take
    # Device blocks that must be free to go on from `computed` to `num_tokens`, with those that are on the host.
    def blocks_to_reach(self, computed: int, num_tokens: int) -> int: ...
    # Appends rows up to num_tokens, with blocks of its own where `present` says so, entry by entry; False: too few.
    def try_append(self, present: Sequence[bool], num_tokens: int) -> bool: ...
    # Makes positions [begin, end) writable; the copies to make first. None: too few blocks, nothing has changed.
    # Positions from `end` on hold nothing afterwards. Blocks that others can see are replaced, never rewritten.
    def try_prepare_write(self, begin: int, end: int) -> Pairs | None: ...
    # Enters the full blocks of tokens[:num_computed] into the prefix index. Cheap to repeat.
    def commit(self, tokens: TokenList, num_computed: int) -> None: ...
    def uncommit(self, from_token: int) -> None: ...  # its own blocks from there on, with all entered below them
    def fork(self) -> BlockTable: ...
    def slice_to(self, num_tokens: int) -> BlockTable: ...  # shares the blocks that cover the first ones
    def truncate(self, num_tokens: int) -> None: ...
    def share_front(self, other: BlockTable, num_rows: int) -> None: ...  # takes the other's, which hold the same
    def free(self) -> None: ...  # idempotent; the table is empty afterwards and can be used again
    def epochs(self) -> BlockEpochs: ...  # of the leading blocks on the device, for adopt()
    blocks: Final[list[int]]  # of the device as b, of the host as -b: engine/cache/entries.py tells them apart
    entries: Final[list[int]]  # the same, row by row, a strip beside the other; 0 where a window has nothing any more
    capacity: Final[int]  # tokens that its rows cover
    num_shared: Final[int]  # blocks that another table holds too
    num_on_host: Final[int]
    resident: Final[bool]  # all are on the device; else it cannot be matched, written, committed or scheduled
    def __len__(self) -> int: ...  # blocks that it holds

class BeamEpochs:  # the BlockEpochs of several ended beams, not yet made objects
    def num_left(self, pool: BlockPool) -> int: ...  # of all beams together
    def __len__(self) -> int: ...
    def __getitem__(self, beam: int) -> BlockEpochs: ...

class BeamTables:  # of a group of beams, which step together; beam i of len() has number i
    def __init__(self, first: BlockTable) -> None: ...  # one beam, which takes over its blocks: it is empty afterwards
    # Beam i continues beam parents[i] with tokens[i], which the next step computes; others give blocks back.
    def reorder(self, parents: Ints, tokens: Ints) -> None: ...
    def blocks_needed(self, position: int) -> int: ...  # that try_prepare_write(position) takes, or more
    # Makes `position` of every beam writable; the copies [C, 2] to make first. None: no room, nothing changed.
    def try_prepare_write(self, position: int) -> Ints | None: ...
    # Of a step whose beams the device chooses: `width` beams that write `position` to blocks of their own, and the
    # copies [width * strips, 2] to make first, beam by beam, or none; beam i's is of a block of beam i % len() until
    # the parents are known. None: whole blocks differ, or there is no room.
    def try_ahead(self, width: int, position: int) -> tuple[BeamTables, Ints] | None: ...
    # Made by before.try_ahead(), it takes its place, with its ended beams; the first len(tokens) beams run on.
    def succeed(self, before: BeamTables, tokens: Ints) -> None: ...
    def fork(self, beam: int) -> BlockTable: ...  # shares the beam's blocks
    def blocks(self, beam: int) -> list[int]: ...
    # Beams that end share the blocks of the running ones rows[i] and keep them, at the place that is returned + i.
    def end(self, rows: Ints) -> int: ...
    def take_ended(self, place: int) -> BlockTable: ...  # which is not here any more then
    # Of the first num_tokens[i] positions of the beam that ended at places[i], or of running rows[i] for NO_PLACE.
    def epochs(self, *, places: Ints, rows: Ints, num_tokens: Ints) -> BeamEpochs: ...
    def front_blocks(self) -> list[int]: ...  # that all running beams begin with, held once
    def ended_blocks(self) -> list[list[int]]: ...  # of each place; empty where the table was taken
    def free(self) -> None: ...  # there are no beams afterwards, running or ended
    def __len__(self) -> int: ...

def count_distinct_blocks(tables: Sequence[BlockTable]) -> int: ...  # in both pools, shared ones once

# Moves blocks that only these tables hold, none that the open plan writes or swapped in. None: no room.
def try_swap_out(tables: Sequence[BlockTable], host: BlockPool) -> Pairs | None: ...

# As many of them as fit, at most `most`, tails first.
def swap_out_some(tables: Sequence[BlockTable], host: BlockPool, most: int) -> Pairs: ...
def try_swap_in(tables: Sequence[BlockTable], device: BlockPool) -> Pairs | None: ...  # all of the tables' host blocks

class Batch:  # arrays of a step as StepPlan wants them: T tokens, S sequences, MB columns, G strips
    input_ids: Final[Ints]  # [T]
    input_rows: Final[Ints]  # [T]
    positions: Final[Ints]  # [T]
    query_start: Final[Ints]  # [S + 1]
    seq_lens: Final[Ints]  # [S]
    slot_mapping: Final[npt.NDArray[np.int64]]  # [G, T]
    block_tables: Final[Ints]  # [G, S, MB]

def gather_tables(tables: Sequence[BlockTable]) -> Ints: ...  # [S, MB] of resident ones, padded with block 0

# A chunk is (tables, tokens, computed, scheduled, last_row): it computes positions [computed, computed + scheduled),
# whose blocks are prepared. BeamTables are as many sequences of one position each, whose tokens they know themselves.
# At most one position may lie behind the end of the tokens: its input_row is last_row, all others are NO_ROW. Streams,
# which come first, compute their last position. `room` is (T, S, MB) of the arrays, 0: as many as there have to be;
# padding has slot -1 and rows of length 0.
def prepare_batch(
    streams: Sequence[Progress],
    chunks: Sequence[tuple[BlockTable | BeamTables, TokenList, int, int, int]],
    room: tuple[int, int, int] = (0, 0, 0),
) -> Batch: ...
