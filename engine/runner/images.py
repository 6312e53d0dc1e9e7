"""Images on the device: what the tower made of them, and what tokens of a step begin with. Device thread only."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bequest.engine.layers.start import Overlay
from bequest.engine.models.towers.tower import Tower
from bequest.engine.types.image import StepImages


class SeenImages:
    def __init__(self, tower: Tower | None) -> None:
        self._tower = tower
        self._rows: dict[int, Tensor] = {}  # first id → [rows, H]

    def look(self, images: StepImages) -> None:
        """Drops what the step drops, and looks at what it looks at."""
        for first_id in images.dropped:
            del self._rows[first_id]
        for image in images.looked_at:
            assert self._tower is not None, "a model without a tower was sent an image"
            rows = self._tower.look(image.pixels)
            assert len(rows) == image.num_rows, (len(rows), image.num_rows)
            self._rows[image.first_id] = rows

    def overlay(self, images: StepImages) -> Overlay | None:
        """Rows that take the place of the table's."""
        if not images.gathered:
            return None
        device = next(iter(self._rows.values())).device
        tokens = np.concatenate([part.tokens for part in images.gathered])
        rows = [self._rows[part.image][torch.from_numpy(part.rows).to(device)] for part in images.gathered]
        return Overlay(torch.from_numpy(tokens).long().to(device), torch.cat(rows))
