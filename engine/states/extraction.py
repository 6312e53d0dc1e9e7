"""Extractions of hidden states: their queue below generation, their share of the tokens, and the memory of states.

Owned by the event-loop thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from bequest.engine.errors import AnswerTooLarge, QueueFull
from bequest.engine.scheduling.fairness import FairQueue
from bequest.engine.scheduling.sequence import Group, Sequence
from bequest.engine.states.step_lengths import StepLengths
from bequest.engine.types import ModelInfo, Request
from bequest.engine.types.states import ITEM_BYTES, ExtractedStates

if TYPE_CHECKING:
    from bequest.engine.scheduling.draft import Draft
    from bequest.engine.scheduling.step import Launch

Fill = Callable[["Draft"], None]
Schedule = Callable[["Draft", list[Sequence]], None]
Admit = Callable[["Draft", Sequence], bool]

_ANY = 1 << 30  # tokens: as many as a step has


@dataclass(frozen=True, slots=True)
class ExtractionLimits:
    share: float = 0.1  # of the computed tokens, while generations run and extractions wait
    max_queued: int = 1024
    max_request_bytes: int = 1 << 30  # of the states of one request
    max_bytes: int = 4 << 30  # of all that are collected or being sent
    max_step_rows: int = 1 << 16  # states, of one token and one layer each, that a step stores
    # Of steps of nothing else, which a generation that comes meanwhile waits for: their tokens, what these may be cut
    # to where generations come and go (ascending), and whether one is queued while another step runs.
    max_step_tokens: int | None = None
    short_steps: tuple[int, ...] = ()
    queues_steps: bool = True


@dataclass(frozen=True, slots=True)
class Room:
    """What a step has for extractions when all others have what they need."""

    most: int  # tokens of the step
    extracted: int  # theirs already
    generating: bool  # a generation runs, in this step or before it
    queued: bool  # they may be alone in a step that is queued where this one is
    extracting: bool  # some run


class ShareOfTokens:
    """Credit of extractions against the tokens that generations compute while these wait."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._rate = share / (1 - share)
        self._credit = 0.0

    def due(self, most: int) -> int:
        """Tokens of the next step that are theirs."""
        return max(0, min(int(self._credit), most))

    def settle(self, generated: int, extracted: int, most: int) -> None:
        """A step of `most` tokens has so many of each. What cannot be used does not pile up: it would come as one large
        step, for which the streams of the generations would have to wait. An encoder's run, which is not cut, may leave
        a debt."""
        credit = self._credit + self._rate * generated - extracted
        self._credit = min(credit, max(1.0, self._share * most))

    def forget(self) -> None:
        """Nobody wants any."""
        self._credit = 0.0


class Extractions:
    def __init__(self, limits: ExtractionLimits) -> None:
        self.limits = limits
        self.waiting = FairQueue()
        self.memory = StatesMemory(limits)
        self._share = ShareOfTokens(limits.share)
        self._lengths = StepLengths((*limits.short_steps, limits.max_step_tokens or _ANY))

    def ran(self, launch: Launch, seconds: float) -> None:
        """A step took the device so long; 0: nobody knows."""
        plan = launch.plan
        if not seconds or plan.encoders:
            return
        if launch.extracts_only:
            self._lengths.extracted(plan.num_tokens, seconds)
        elif plan.num_tokens == len(launch.sampled) and not launch.num_prompt_tokens and plan.taps is None:
            self._lengths.decoded(seconds)

    def begin(self, draft: Draft, fill: Fill) -> int:
        """Their share, before generations take what they need: what they cannot use is these' again.

        Returns the number of their tokens.
        """
        most, short = draft.budget, draft.short
        draft.budget = self._share.due(most)
        due = draft.budget
        if due:
            fill(draft)
        extracted = due - draft.budget
        draft.budget = most - extracted
        draft.short = short  # where an extraction finds no blocks, a generation may
        return extracted

    def end(self, draft: Draft, fill: Fill, room: Room) -> None:
        """All that is left of a step, if they are alone in it and on the device."""
        generated = room.most - draft.budget - room.extracted
        if room.generating:
            self._lengths.generates(draft.now)
        if generated == 0 and not room.generating and room.queued:
            draft.budget = max(0, min(draft.budget, self._lengths.most_tokens(draft.now) - room.extracted))
            fill(draft)
            self._share.forget()  # what nobody else could have used is no debt
        else:
            self._share.settle(generated, room.extracted + draft.overdrawn, room.most)
        if not room.extracting and not len(self.waiting):
            self._share.forget()

    def fill(self, draft: Draft, running: list[Sequence], schedule: Schedule, admit: Admit) -> None:
        """Running extractions by urgency, then waiting ones, as far as the budget goes."""
        schedule(draft, running)
        while draft.budget > 0 and draft.state_rows > 0 and not draft.short:
            sequence = self.waiting.head()
            if sequence is None or not self._try_take_memory(sequence.group) or not admit(draft, sequence):
                return

    def charge(self, group: Group, info: ModelInfo) -> None:
        """Counts what the states of a new group may take. An extraction is charged when it begins; a generation now,
        since nothing may hold it up later. Raises AnswerTooLarge, QueueFull."""
        group.states_bytes = self.memory.check(group.request, info)
        if group.request.hidden_states is not None and not group.request.extracts:
            self.take_memory(group)

    def take_states(self, group: Group, info: ModelInfo, give_back: Callable[[int], None]) -> ExtractedStates | None:
        """The states of a group that has finished; their memory is charged for until `give_back` is told its bytes,
        by whichever thread drops them."""
        captures = [(s.choice, s.capture) for s in group.sequences if s.capture is not None]
        if not captures:
            return None
        assert group.holds_states_memory
        group.holds_states_memory = False
        choices = tuple(capture.states(choice, info) for choice, capture in captures)
        return ExtractedStates(choices, group.states_tokens, partial(give_back, group.states_bytes))

    def take_memory(self, group: Group) -> None:
        """Charges for the states of a group. Raises QueueFull."""
        self.memory.take(group.states_bytes)
        group.holds_states_memory = True

    def release_memory(self, group: Group) -> None:
        if group.holds_states_memory:
            group.holds_states_memory = False
            self.memory.give_back(group.states_bytes)

    def _try_take_memory(self, group: Group) -> bool:
        if not group.holds_states_memory:
            if not self.memory.fits(group.states_bytes):
                return False
            self.take_memory(group)
        return True


class StatesMemory:
    """Host memory for states, from the time that a request begins to collect them until its answer is written."""

    def __init__(self, limits: ExtractionLimits) -> None:
        self._limits = limits
        self.used = 0

    def check(self, request: Request, info: ModelInfo) -> int:
        """The most bytes that the request can come to hold. Raises AnswerTooLarge."""
        wanted = request.hidden_states
        if wanted is None:
            return 0
        rows = request.most_states
        needed = rows * len(wanted.tapped_layers) * info.hidden_size * ITEM_BYTES[info.states_dtype]
        most = min(self._limits.max_request_bytes, self._limits.max_bytes)
        if needed > most:
            raise AnswerTooLarge(
                f"The hidden states may take {needed} bytes, at most {most}.",
                reason="states_too_large",
                field="hidden_states",
                details={"budget": most, "needed": needed},
                rows=rows,
                layers=len(wanted.tapped_layers),
            )
        return needed

    def fits(self, num_bytes: int) -> bool:
        return self.used + num_bytes <= self._limits.max_bytes

    def take(self, num_bytes: int) -> None:
        """Raises QueueFull if others hold too much at the moment."""
        if not self.fits(num_bytes):
            raise QueueFull(
                f"The memory for hidden states is full ({self._limits.max_bytes} bytes).",
                reason="states_full",
                details={"budget": self._limits.max_bytes, "used": self.used, "needed": num_bytes},
            )
        self.used += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.used -= num_bytes
        assert self.used >= 0, "bytes were given back twice"
