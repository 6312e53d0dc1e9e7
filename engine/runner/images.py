"""Images on the device: what the tower made of them, and what tokens of a step begin with. Device thread only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bequest.engine.kernels.cuda_capture import Pool
from bequest.engine.layers.start import Overlay
from bequest.engine.layers.together import Together, TogetherSpan
from bequest.engine.models.towers.tensors import sent
from bequest.engine.models.towers.tower import Tower
from bequest.engine.types.image import Image, ImageRows, StepImages, TogetherRows
from bequest.engine.types.plan import StepBatch


def _span(rows: TogetherRows, batch: StepBatch, block_size: int, device: torch.device) -> TogetherSpan:
    places = np.arange(rows.end)
    tables = batch.block_tables[:, rows.sequence].astype(np.int64)  # [G, MB]
    slots = tables[:, places // block_size] * block_size + places % block_size
    return TogetherSpan(sent(rows.tokens.astype(np.int64), device), rows.begin, rows.end, sent(slots, device).unbind())


class SeenImages:
    def __init__(self, tower: Tower | None, device: torch.device, dtype: torch.dtype) -> None:
        """`dtype`: of rows, what the tower computes in."""
        self._tower = tower
        self._device = device
        self._dtype = dtype
        self._num_states = 1 if tower is None else 1 + tower.config.num_deep
        self._rows: dict[int, Tensor] = {}  # first id → [rows, H], or [rows, (1 + deep layers) · H]

    def see(self, images: StepImages, batch: StepBatch, block_size: int) -> Overlay | None:
        """Drops what the step drops, and looks at what it looks at. Rows that take the place of the table's."""
        for first_id in images.dropped:
            del self._rows[first_id]
        for image in images.looked_at:
            rows = self._made(image)
            assert len(rows) == image.num_rows, (len(rows), image.num_rows)
            self._rows[image.first_id] = rows
        if not images.gathered:
            return None
        overlay = self._gathered(images.gathered)
        if not images.together:
            return overlay
        spans = [_span(rows, batch, block_size, overlay.rows.device) for rows in images.together]
        return replace(overlay, together=Together(spans))

    def _made(self, image: Image) -> Tensor:
        """[rows, H], or [rows, (1 + deep layers) · H]; given rows add nothing to deep layers."""
        if not image.is_seen:
            rows = sent(image.content, self._device).to(self._dtype)
            return functional.pad(rows, (0, (self._num_states - 1) * rows.shape[1]))
        assert self._tower is not None, "a model without a tower was sent an image"
        return self._tower.look(image.content)

    def use_graphs(self, pool: Pool) -> None:
        if self._tower is not None:
            self._tower.use_graphs(pool)

    def look_at_nothing(self, max_patches: int) -> None:
        """A run of the largest size, to see what it takes."""
        if self._tower is not None:
            self._tower.look_at_nothing(max_patches)

    def _gathered(self, parts: Sequence[ImageRows]) -> Overlay:
        device = self._device
        tokens = np.concatenate([part.tokens for part in parts]).astype(np.int64)
        rows = torch.cat([self._rows[part.image][sent(part.rows, device)] for part in parts])
        first, *deep = rows.chunk(self._num_states, dim=1)
        turns = [part.turns for part in parts if part.turns is not None]
        placed = sent(np.concatenate(turns), device) if turns else None
        return Overlay(sent(tokens, device), first, placed, deep=tuple(deep))
