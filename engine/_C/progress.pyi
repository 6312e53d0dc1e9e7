"""How far sequences are, and loops over those of a step: csrc/bindings/progress.h, bind_streams.cpp."""

from collections.abc import Collection
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .cache import BlockTable, TokenList
from .core import Ints

T = TypeVar("T", bound=Progress)

class Progress:  # what a sequence derives from
    tokens: TokenList
    table: BlockTable
    status: Any
    ends: Collection[int] | None  # tokens that its work looks at; None: all
    outlet: Any  # where tokens go that are nothing but their own text; None: its work looks at all
    matcher: Any  # where it stands in its grammar, if it has one
    account: Any  # its tenant's
    num_prompt: int
    num_computed: int  # tokens whose KV a launched step has written or will write
    num_in_flight: int  # sampled by a launched step, not yet applied
    num_output: int  # sampled and applied
    planned_len: int  # len(tokens) + num_in_flight, but for drafts
    most_len: int  # from there on it wants no more samples
    free_until: int  # its work looks at the output of this number, counted from 1, and at all behind it
    row: int
    num_logprobs: int  # alternatives that are wanted of a sample; -1: no log-probabilities
    adapter: int  # the handle of its LoRA adapter, or 0
    last_token_at: float  # on the engine's clock; 0: it has none
    # Its next token, if it needs one, takes a slot and nothing else, and past its prompt it leads to a sample and
    # nothing else; it is ready by `most_len` and `num_prompt`. Such a sequence that has a row is a stream.
    plain: bool

# Plain ones that need one token, those that need more, and sequences that are not plain.
def ready_streams(running: dict[T, None]) -> tuple[list[T], list[T], list[T]]: ...

# Plans the next token of streams, from number `first` on and `most` at most, until one that is no stream or finds no
# block. Those whose status is not `running`, or that are in `used`, are passed over. Returns them, which `used` has
# now, the (source, destination) blocks to copy, and the number of the first sequence that was not reached.
def plan_streams(
    sequences: list[T], first: int, most: int, used: set[T], running: object
) -> tuple[list[T], list[tuple[int, int]], int]: ...

# A launched step samples a token for each stream. Returns the positions, the largest number of alternatives that
# anybody wants, and how many have a matcher.
def sample_streams(streams: list[Any]) -> tuple[list[int], int | None, int]: ...
def count_accounts(sequences: list[Any]) -> list[tuple[Any, int]]: ...  # how many sequences each has, if any
def rows_of(sequences: list[Any]) -> Ints: ...  # [S]
def any_adapter(sequences: list[Any]) -> bool: ...

# The result of a step that has one sample for each sequence. A token that its work need not look at is accepted, if the
# status of its sequence is `running`; `commits`: full blocks become findable. Returns these sequences, their tokens and
# the seconds since the token before; and the numbers of all other samples.
def take_samples(
    sequences: tuple[T, ...],
    tokens: Ints,
    bad_rows: npt.NDArray[np.bool_],
    now: float,
    running: object,
    commits: bool,
) -> tuple[list[T], list[int], list[float], list[int]]: ...
