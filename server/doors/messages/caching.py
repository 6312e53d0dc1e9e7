"""What `cache_control` asks for: the beginning of a prompt is leased, up to the block that has it.

The lease is a request of its own, which samples nothing. It is a child of the message: it shares the message's blocks
and computes one token. Its name says what it holds, so that the same beginning is leased once, and its time counts anew
each time that it is asked for. Where the budget of leases has no room the message goes on without, and its usage says
so.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from bequest.engine.errors import EngineError, ParentNotFound
from bequest.engine.types import Delta, Lineage, OutputMode, Request, Retain, Terms, Usage
from bequest.server.asks.prompt import Prompt
from bequest.server.asks.sampling import NOTHING_SAMPLED
from bequest.server.context import Context
from bequest.server.doors.messages.cache_marks import SECONDS
from bequest.server.doors.messages.prompt import CacheLength
from bequest.server.wire.names import new_id

_log = logging.getLogger("bequest.server")


@dataclass(slots=True)
class CacheWriter:
    """The leases of one message."""

    context: Context
    request: Request  # the message's
    wanted: Sequence[CacheLength]  # the shorter first
    _refused: set[str] = field(default_factory=set)

    def write(self) -> None:
        """REQUIRES: the message's prompt has been computed."""
        for length in self.wanted:
            try:
                self._lease(length)
            except EngineError as error:
                _log.info("cache_control of %s is not granted: %s", self.request.id, error.code)
                self._refused.add(length.ttl)

    def _lease(self, length: CacheLength) -> None:
        engine, tenant = self.context.engine, self.request.tenant
        seconds = min(SECONDS[length.ttl], self.context.leases.longest)
        ids = self.request.prompt_token_ids[: length.num_tokens]
        name = f"cache:{length.ttl}:{_digest(ids, self.request.cache_salt)}"
        with suppress(ParentNotFound):
            engine.set_ttl(tenant, name, seconds)
            return
        engine.submit(self._child(ids, name, seconds), _unheard)

    def _child(self, ids: tuple[int, ...], name: str, seconds: float) -> Request:
        main, held = self.request, set(ids)
        return Request(
            id=new_id("cache-"),
            tenant=main.tenant,
            prompt_token_ids=ids,
            params=NOTHING_SAMPLED.params(Prompt(ids), self.context.engine.info),
            priority=main.priority,
            cache_salt=main.cache_salt,
            output=OutputMode.FINAL,
            images=tuple(image for image in main.images if image.first_id in held),
            terms=Terms(lineage=Lineage(main.id, 0, len(ids)), name=name, retain=Retain(seconds)),
        )

    def usage(self, usage: Usage) -> dict[str, object]:
        """Of the prompt: what was read from the cache, what was written there, and the rest."""
        read, written = usage.cached_tokens, dict.fromkeys(SECONDS, 0)
        done = read
        for length in self.wanted:
            if length.ttl not in self._refused:
                written[length.ttl] += max(length.num_tokens - done, 0)
                done = max(done, length.num_tokens)
        return {
            "input_tokens": usage.prompt_tokens - done,
            "cache_creation_input_tokens": done - read,
            "cache_read_input_tokens": read,
            "cache_creation": {f"ephemeral_{ttl}_input_tokens": count for ttl, count in written.items()},
            "output_tokens": usage.completion_tokens,
        }


def _digest(ids: Sequence[int], salt: str) -> str:
    return hashlib.blake2b(array("I", ids).tobytes(), digest_size=16, key=salt.encode()[:64]).hexdigest()


def _unheard(delta: Delta) -> None:
    if delta.error is not None:
        _log.info("cache_control of %s is not granted: %s", delta.request_id, delta.error.code)
