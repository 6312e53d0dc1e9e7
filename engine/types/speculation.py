"""What a request says about drafts. Frozen, complete when constructed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Literal

import msgspec

# off: nothing is drafted; ngram: what followed the same tokens before, in the request itself; suffix: there, or in
# what the tenant's records say; draft, eagle3: what a smaller model or a head says that runs beside this one; mtp: what
# the head of the model's own checkpoint says
DraftMethod = Literal["off", "ngram", "suffix", "draft", "eagle3", "mtp"]
BY_MODEL = ("draft", "eagle3", "mtp")
_NUMBERED = ("ngram", "suffix", *BY_MODEL)
_METHODS = ", ".join(_NUMBERED[:-1]) + f" or {_NUMBERED[-1]}"
MOST_DRAFTED = 16  # tokens of one sequence in one step


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """Drafts change no token of an answer, only how soon it is there."""

    method: DraftMethod | None = None  # None: the engine's own
    most: int | None = None  # tokens that are drafted at a time; None: as many as pay
    prediction: tuple[int, ...] = ()  # what the client expects of the answer

    def __post_init__(self) -> None:
        assert self.most is None or 1 <= self.most <= MOST_DRAFTED


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCosts:
    """What a device takes to check drafts, in steps that sample each sequence once (benchmarks/speculation.py,
    benchmarks/gpu_speculation.py)."""

    row: float  # for each drafted token, where others run beside it or nothing was measured
    check: float = 0.0  # once: to wait for the tokens in flight, and for kernels of more than one row
    rows: int  # of a step, up to which this is so: a crowd has none to spare
    unasked: bool = True  # whether to draft for requests that say nothing of it
    steps: tuple[float, ...] = ()  # as measured at the start: to check so many drafts of a sequence alone, in all
    model: ModelDrafts | None = None  # who drafts on the device; None: nobody does

    def of(self, count: int, *, beside: bool) -> float:
        """A step that checks so many drafts. `beside`: others run."""
        if beside or not self.steps:
            return 1 + self.check + self.row * count
        return self.steps[count] if count < len(self.steps) else inf

    def by_model(self, one_pass: float) -> DraftCosts:
        """Of who takes a pass for each draft, and one more to read what came of them; in steps."""
        steps = tuple(cost + one_pass * (1 + count) for count, cost in enumerate(self.steps))
        return replace(self, row=self.row + one_pass, check=self.check + one_pass, steps=steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDrafts:
    """A model or a head that drafts on the device."""

    method: DraftMethod
    costs: DraftCosts


ON_CPU = DraftCosts(row=0.12, rows=8)
ON_GPU = DraftCosts(row=0.005, check=0.15, rows=64, unasked=False)


def parse_speculative(value: str) -> tuple[str, int | None]:
    """`auto`, `off`, or a method with or without a number of tokens: `ngram:4`. Raises ValueError."""
    name, colon, count = value.partition(":")
    if name not in ("auto", "off", *_NUMBERED):
        raise ValueError(f"speculative must be auto, off, or {_METHODS}, with :K or without, not {value!r}")
    if not colon:
        return name, None
    if name not in _NUMBERED or not count.isdecimal() or not 1 <= int(count) <= MOST_DRAFTED:
        raise ValueError(f"speculative: K is 1 to {MOST_DRAFTED} tokens, behind {_METHODS}, not {value!r}")
    return name, int(count)
