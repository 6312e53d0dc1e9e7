"""Sampling, catalogues and beams: csrc/ops."""

from collections.abc import Sequence
from typing import Final

from .core import Ids, Ints
from .structs import Rows

Draw = tuple[float, int, float, float, int, int]  # temperature, top_k, top_p, min_p, seed, choice
Penalties = tuple[float, float, float]  # presence, frequency, repetition
# min_tokens, logit_bias, allowed, bad_words, held_back
TokenBounds = tuple[int, Sequence[tuple[int, float]], Ids | None, Sequence[Ids], Ids]
Logits = tuple[int, int, int, int, int]  # address, N, V, elements between rows, dtype
BeamStep = tuple[int, int, int, int, int]  # cumulative [R], nodes [R] or 0, group_start [G + 1], records [G], G
BeamOutput = tuple[int, int, int, int, int, int]  # score, row, token, logprob [G, K]; bad [R]; K
LogprobOutput = tuple[int, int, int, int]  # of the chosen ones [N], rank [N], best ids [N, K], theirs [N, K]

class Sampler:
    def __init__(self, num_rows: int, vocab_size: int) -> None: ...
    def open_row(
        self, row: int, draw: Draw, penalties: Penalties, bounds: TokenBounds, prompt: Ids, outputs: Ids
    ) -> None: ...
    def close_row(self, row: int) -> None: ...
    def constrain_row(self, row: int, catalogue: Catalogue, end_tokens: Ids, outputs: Ids) -> None: ...
    def resolve(self, ids: int, rows: int, count: int) -> None: ...
    def sample(self, logits: Rows, rows: int, positions: int, masks: int, tokens: int, bad: int) -> None: ...
    def guess(self, logits: Rows, rows: int, positions: int, tokens: int, bad: int) -> None: ...  # no row changes

def logprobs(logits: Logits, chosen: int, top: int, out: LogprobOutput) -> None: ...
def philox4x32(counter: Ids, key: int) -> list[int]: ...  # four words for a counter of four words

class Catalogue:
    def __init__(
        self, tokens: int, offsets: int, num_items: int, width: int, vocab_size: int, num_threads: int
    ) -> None: ...  # `offsets` 0: rows of `width` tokens, padded with -1
    def child(self, node: int, token: int) -> int: ...
    def child_of_each(self, nodes: Ints, tokens: Ints) -> Ints: ...
    def children(self, node: int) -> Ints: ...
    def is_terminal(self, node: int) -> bool: ...
    num_items: Final[int]
    num_bytes: Final[int]
    vocab_size: Final[int]
    tokens: Final[Ints]
    first_child: Final[Ints]
    terminal: Final[Ints]

def beam_candidates(logits: Logits, step: BeamStep, out: BeamOutput) -> None: ...
