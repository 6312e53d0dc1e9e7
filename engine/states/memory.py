"""Host memory for hidden states, from when a request begins to collect them until its answer is written.

Owned by the event-loop thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bequest.engine.errors import AnswerTooLarge, QueueFull
from bequest.engine.state.sequence import Group, Lane
from bequest.engine.types import ModelInfo, Request
from bequest.engine.types.states import ITEM_BYTES, ExtractedStates


class StatesMemory:
    def __init__(self, max_bytes: int, max_request_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_request_bytes = max_request_bytes
        self.used = 0

    def charge(self, group: Group, info: ModelInfo) -> None:
        """Counts what the states of a new group may take. An extraction is charged when it begins; a generation now,
        since nothing may hold it up later. Raises AnswerTooLarge, QueueFull."""
        group.states.most_bytes = self._most_bytes(group.request, info)
        if group.request.hidden_states is not None and group.kind.lane is Lane.GENERATION:
            self._take(group)

    def try_charge(self, group: Group) -> bool:
        """An extraction is about to begin. False: others hold too much at the moment."""
        if not group.states.held:
            if not self._fits(group.states.most_bytes):
                return False
            self._take(group)
        return True

    def release(self, group: Group) -> None:
        if group.states.held:
            group.states.held = False
            self.give_back(group.states.most_bytes)

    def take_states(self, group: Group, info: ModelInfo, give_back: Callable[[int], None]) -> ExtractedStates | None:
        """The states of a group that has finished; their memory is charged for until `give_back` is told its bytes,
        by whichever thread drops them."""
        captures = [(s.choice, s.capture) for s in group.sequences if s.capture is not None]
        if not captures:
            return None
        assert group.states.held
        group.states.held = False
        choices = tuple(capture.states(choice, info) for choice, capture in captures)
        return ExtractedStates(choices, group.states.num_tokens, partial(give_back, group.states.most_bytes))

    def give_back(self, num_bytes: int) -> None:
        self.used -= num_bytes
        assert self.used >= 0, "bytes were given back twice"

    def _take(self, group: Group) -> None:
        num_bytes = group.states.most_bytes
        if not self._fits(num_bytes):
            raise QueueFull(
                f"The memory for hidden states is full ({self._max_bytes} bytes).",
                reason="states_full",
                details={"budget": self._max_bytes, "used": self.used, "needed": num_bytes},
            )
        self.used += num_bytes
        group.states.held = True

    def _fits(self, num_bytes: int) -> bool:
        return self.used + num_bytes <= self._max_bytes

    def _most_bytes(self, request: Request, info: ModelInfo) -> int:
        """That the request can come to hold. Raises AnswerTooLarge."""
        wanted = request.hidden_states
        if wanted is None:
            return 0
        rows = request.most_states
        needed = rows * len(wanted.tapped_layers) * info.hidden_size * ITEM_BYTES[info.states_dtype]
        most = min(self._max_request_bytes, self._max_bytes)
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
