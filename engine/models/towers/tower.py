"""A vision tower: pixels become rows that tokens of a prompt begin with.

Mostly torch: a tower multiplies large matrices, and there is little to win over torch's own products.
On a CPU it computes in float32, whatever the weights were stored in; on a GPU as the text model does. Owned by the
device thread.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from bequest.engine.kernels.cuda_capture import Pool
from bequest.engine.layers.ops import Ops
from bequest.engine.models.reader import Lister, Reader, Shape
from bequest.engine.models.towers.config import VisionConfig, VitConfig
from bequest.engine.models.towers.grid_eye import GridEye
from bequest.engine.models.towers.square_eye import SquareEye
from bequest.engine.models.towers.tensors import Tensors, sent
from bequest.engine.models.towers.tower_graphs import TowerGraphs
from bequest.engine.types.image import Pixels
from bequest.engine.vision.processor import Normalisation


class Eye(Protocol):
    """Of one shape of tower, with its projector."""

    def rows(self, values: Tensor, ops: Ops) -> Tensor:
        """[F, 3, height, width], normalised → [rows, H]; `ops`: kernels for what torch has no single one for."""
        ...

    def held(self, height: int, width: int) -> object:
        """What runs of this size read on the device, beside their input and the weights."""
        ...

    def largest(self, max_patches: int) -> tuple[int, int, int]:
        """Frames, height and width of the largest input of so many patches, or of one frame if that is larger."""
        ...


class Tower:
    def __init__(
        self, config: VisionConfig, read: Reader, normalisation: Normalisation, dtype: torch.dtype, ops: Ops
    ) -> None:
        self.config = config
        self.dtype = dtype
        self._ops = ops
        self._eye = _eye(config, Tensors(read, dtype))
        self._shift = read.placed(torch.tensor(normalisation.mean))
        self._std = read.placed(torch.tensor(normalisation.std))
        self._scale = normalisation.scale
        self._graphs: TowerGraphs | None = None

    def use_graphs(self, pool: Pool) -> None:
        """From now on, of sizes that come again. `pool`: as in TowerGraphs. REQUIRES: a GPU"""
        self._graphs = TowerGraphs(self._rows, lambda shape: self._eye.held(shape[1], shape[2]), pool)

    @torch.inference_mode()
    def look(self, pixels: Pixels) -> Tensor:
        """[F, height, width, 3] → [rows, H]"""
        given = sent(pixels, self._shift.device)
        return self._rows(given) if self._graphs is None else self._graphs.run(given)

    def _rows(self, given: Tensor) -> Tensor:
        values = (given.to(torch.float32) * self._scale - self._shift) / self._std
        return self._eye.rows(values.permute(0, 3, 1, 2).to(self.dtype).contiguous(), self._ops)

    def look_at_nothing(self, max_patches: int) -> None:
        """A run of the largest size: what it allocates at its peak is what runs need."""
        self.look(np.zeros((*self._eye.largest(max_patches), 3), np.uint8))


def _eye(config: VisionConfig, read: Tensors) -> Eye:
    if isinstance(config.tower, VitConfig):
        return SquareEye(config.tower, config.out_size, read)
    return GridEye(config.tower, config.out_size, read)


def expected_tensors(config: VisionConfig) -> dict[str, Shape]:
    """Every tensor that is read, by the names of names.py."""
    lister = Lister()
    _eye(config, Tensors(lister, torch.float32, torch.device("meta")))
    return lister.shapes
