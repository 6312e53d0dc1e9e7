"""What tokens of images begin with, at places that graphs know. Device thread only.

A graph of a step with prompts takes these rows for the tokens that are marked, and the table's for all others. So a
step with images replays the same graph as one without: rows, marks and positions are written before it. Where tokens of
images get more behind the first layers, as in Qwen3-VL, that has fixed places, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bequest.engine.layers.start import FixedOverlay, Overlay
from bequest.engine.models.any_model import Model
from bequest.engine.models.decoder import Decoder
from bequest.engine.models.towers.tower import Tower
from bequest.engine.runner.cuda_sizes import StepSize
from bequest.engine.types.image import StepImages

_SHORT = 16  # tokens


class FixedPlaces:
    def __init__(self, model: Model, tower: Tower | None, max_tokens: int, dtype: torch.dtype, device: torch.device):
        """Nothing without a tower: graphs then know nothing of it."""
        count = 0 if tower is None else max_tokens
        self._model = model
        num_deep = 0 if tower is None else tower.config.num_deep
        self._rows = torch.zeros(count, model.config.hidden_size, dtype=dtype, device=device)
        self._deep = [torch.zeros_like(self._rows) for _ in range(num_deep)]
        self._marks = torch.zeros(count, 1, dtype=torch.bool, device=device)
        self._marked = False

    def of(self, size: StepSize) -> FixedOverlay | None:
        """Of a graph. Steps of one token for each sequence have hardly ever one of an image; and short steps run faster
        where nothing is added between layers."""
        num = size.num_tokens
        if not size.prefill or not len(self._rows) or (self._deep and num <= _SHORT):
            return None
        return FixedOverlay(self._rows[:num], self._marks[:num], tuple(rows[:num] for rows in self._deep))

    def knows(self, images: StepImages | None, size: StepSize) -> bool:
        """Whether a graph of this size can begin as these images need it."""
        if images is None or not images.gathered:
            return True
        return self.of(size) is not None and not images.together

    def place(self, overlay: Overlay | None, positions: Tensor) -> None:
        """For the graph that runs next. `positions`: [T] of its tokens, on the device."""
        if self._marked or overlay is not None:  # in few steps
            self._place(overlay, positions)

    @torch.inference_mode()
    def _place(self, overlay: Overlay | None, positions: Tensor) -> None:
        if self._marked:
            self._marks.zero_()
        self._marked = overlay is not None
        if overlay is not None:
            assert isinstance(self._model, Decoder)
            self._rows[overlay.tokens] = overlay.rows.to(self._rows.dtype)
            for rows, given in zip(self._deep, overlay.deep, strict=True):
                rows[overlay.tokens] = given.to(rows.dtype)
            self._marks.index_fill_(0, overlay.tokens, True)  # `marks[tokens] = True` would wait for the tower
            self._model.turn(positions, overlay)
