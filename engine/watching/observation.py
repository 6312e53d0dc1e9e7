"""What the engine tells whoever watches it: how it stands, what a step did, how a request ended.

All are frozen and complete when constructed. No torch here: the server imports this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from bequest.engine.types import Grade, GradeLoad, Inheritance


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """Adapters that are loaded, and those of them that open requests need, by name."""

    loaded: int
    at_once: int  # that steps can read
    running: tuple[str, ...]
    waiting: tuple[str, ...]  # to run: of other requests


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How the engine stands at this moment."""

    running: int  # sequences
    waiting: int
    used_blocks: int
    usable_blocks: int
    used_host_blocks: int = 0
    usable_host_blocks: int = 0
    retention_budget: int = 0  # blocks
    retention_charged: int = 0  # blocks: held by leases, and promised to running requests
    retained: Mapping[Grade, GradeLoad] = field(default_factory=dict)
    waiting_extractions: int = 0
    states_bytes: int = 0  # of hidden states that are collected or being sent
    block_size: int = 0  # tokens
    prefix_caching: bool = True
    adapters: AdapterLoad = AdapterLoad(0, 0, (), ())


class StepStats(msgspec.Struct, frozen=True):
    """What one applied step did."""

    prompt_tokens: int  # computed in this step, those of encoder inputs among them
    generated_tokens: int
    preempted: int
    swapped_out: int  # blocks
    swapped_in: int
    seconds: float  # on the device
    first_token_seconds: tuple[float, ...]  # arrival to first token, of requests that got theirs in this step
    inter_token_seconds: tuple[float, ...]  # since its last token, of every other sequence that got one
    drafts: int = 0  # sequences for which tokens were drafted
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of them
    images_seen: int = 0  # that the tower looked at
    image_bytes: int = 0  # of their pixels
    images_found: int = 0  # whose rows the step needed and the device had
    experts: tuple[int, int] = (0, 0)  # whose matrices it read, each once for each layer, and that all layers have


class RequestStats(msgspec.Struct, frozen=True):
    """A request that ended."""

    reason: Literal["stop", "length", "abort", "error"]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    max_tokens: int
    n: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    total_seconds: float
    inheritance: Inheritance | None = None
    id: str = ""  # the request's


class Observer(Protocol):
    """Told of every step and every end, on the event-loop thread; must be quick and must not raise."""

    def on_step(self, stats: StepStats) -> None: ...
    def on_finish(self, stats: RequestStats) -> None: ...
