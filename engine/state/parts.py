"""Parts of a group's state: its prompt, its times, what binds it to others, what its hidden states cost.

Owned by the event-loop thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from bequest.engine.state.prompt_logprobs import PromptLogprobs
from bequest.engine.state.record import Record
from bequest.engine.types import Inheritance, Request
from bequest.engine.types.image import ImageSpan, image_spans

NEVER = 1 << 62  # more tokens than anybody samples


@dataclass(slots=True)
class Times:
    """On the engine's clock."""

    arrived: float
    admitted: float | None = None
    first_token: float | None = None


@dataclass(frozen=True, slots=True)
class PromptParts:
    """What a prompt has beside its tokens."""

    logprobs: PromptLogprobs | None  # if they are wanted
    images: tuple[ImageSpan, ...]

    @property
    def shift(self) -> int:
        """From the position of a token behind all images to that of its rotation."""
        return self.images[-1].shift if self.images else 0

    @classmethod
    def of(cls, request: Request) -> PromptParts:
        top, prompt = request.params.prompt_logprobs, request.prompt_token_ids
        logprobs = None if top is None else PromptLogprobs(prompt, top)
        return cls(logprobs, image_spans(prompt, request.images) if request.images else ())


@dataclass(slots=True)
class Ties:
    """What binds a group to those before and after it."""

    record: Record | None = None  # what others may continue from; None once it is closed, or when nobody may
    parent: Record | None = None  # what it continues from, if that is there
    inheritance: Inheritance | None = None  # of a continuation, from its admission on
    cached_tokens: int = 0  # that it found computed when it was admitted
    charged_output: int = NEVER  # tokens of each choice that its lease is charged for


@dataclass(slots=True)
class StatesCharge:
    """What the hidden states of a group cost."""

    most_bytes: int = 0
    held: bool = False  # they are charged for
    num_tokens: int = 0  # of forward that only they needed; of an extraction all
