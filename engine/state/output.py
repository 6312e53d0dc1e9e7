"""One choice of a request on its way to the client, as far as its state is concerned (engine/outputs.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from bequest.engine._C import Outlet
from bequest.engine.types import ChoiceDelta, FinishReason, StopReason, TokenLogprob


class Output(Protocol):
    @property
    def finish_reason(self) -> FinishReason | None: ...

    @property
    def shown_len(self) -> int:
        """Sampled tokens that are part of the text shown."""

    @property
    def outlet(self) -> Outlet | None:
        """Where tokens go that are nothing but their own text; None: they are pushed, like all others."""

    def sibling(self, index: int) -> Output:
        """The output of another choice of the same request."""

    def whole_sibling(
        self, index: int, token_ids: list[int], num_shown: int, logprobs: list[TokenLogprob] | None
    ) -> Output:
        """The same with all its tokens, of which the first `num_shown` have text."""

    def texts_of(self, answers: Sequence[Sequence[int]]) -> list[str]:
        """Of whole answers to the request."""

    def shows_end(self, token_id: int) -> bool:
        """Whether this token is part of the text shown where it ends the choice."""

    def push(self, token_id: int, logprob: TokenLogprob | None, shown: bool) -> str | None:
        """Takes one sampled token; returns the stop string that it completed, if any."""

    def set_beam(self, cumulative_logprob: float, beam_score: float) -> None: ...

    def finish(self, reason: FinishReason, stop_reason: StopReason) -> None: ...

    def take(self, always: bool) -> ChoiceDelta | None:
        """What to deliver now, or None when there is nothing new and not `always`."""
