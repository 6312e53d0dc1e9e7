"""The attention of a model that transformers computes: keys and values go to our cache, queries look there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bequest.engine.layers.ops import Ops
from bequest.engine.layers.parts import Heads
from bequest.engine.layers.step import LayerStep
from bequest.engine.models.strips import KvHeads, Place, divide
from bequest.engine.models.transformers_impl.interface import AttentionResult, number
from bequest.engine.models.transformers_impl.watched import Call


class PagedAttention:
    """An attention function of transformers' interface. Owned by the device thread: it knows the step that runs.

    The calls of a forward come in the order in which they were watched; the n-th has the n-th place in the cache.
    """

    def __init__(self, calls: Sequence[Call], head_dim: int, dtype: torch.dtype, ops: Ops) -> None:
        kept = [KvHeads(call.num_kv_heads, head_dim) for call in calls]
        places = divide([call.window for call in calls], kept).places
        self._calls = [(call, _heads(call, place)) for call, place in zip(calls, places, strict=True)]
        self._head_dim = head_dim  # of the cache
        self._dtype = dtype  # of what kernels take
        self._ops = ops
        self._step: LayerStep | None = None
        self._next = 0

    @contextmanager
    def of_step(self, step: LayerStep) -> Iterator[None]:
        """Every attention of the model must be called within, once."""
        self._step, self._next = step, 0
        try:
            yield
        finally:
            self._step = None
        assert self._next == len(self._calls), f"{self._next} attentions of {len(self._calls)} were called"

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: object = None,
        **given: object,
    ) -> AttentionResult:
        """query [1, NQ, T, D], key and value [1, NKV, T, D] → [1, T, NQ, D]"""
        call, heads = self._calls[self._next]
        self._next += 1
        assert self._step is not None and module is call.module, "another attention than was watched"
        assert number(given.get("scaling"), call.scale) == call.scale, "another scale than was watched"
        rows = torch.cat([self._padded(part) for part in (query, key, value)], dim=1)  # [T, NQ + 2 NKV, D]
        gathered = self._ops.attend(rows.flatten(1).to(self._dtype), heads, self._step)  # [T, NQ D]
        found = gathered.view(-1, call.num_heads, self._head_dim)[..., : call.value_dim]
        return found.to(query.dtype)[None], None

    def _padded(self, part: Tensor) -> Tensor:
        """[1, heads, T, D] → [T, heads, D of the cache], zeros behind: they change no product."""
        rows = part[0].transpose(0, 1)
        missing = self._head_dim - rows.shape[-1]
        return F.pad(rows, (0, missing)) if missing else rows


def _heads(call: Call, place: Place) -> Heads:
    return Heads(
        num_heads=call.num_heads,
        scale=call.scale,
        cache_layer=place.layer,
        strip=place.strip,
        window=call.window,
        soft_cap=call.soft_cap,
        sinks=call.sinks,
    )
