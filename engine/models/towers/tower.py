"""A vision tower and its projector: pixels become rows that tokens of a prompt begin with.

Plain torch: a tower multiplies large matrices and nothing else, so there is little to win over torch's own products.
On a CPU it computes in float32, whatever the weights were stored in; on a GPU as the text model does. Owned by the
device thread.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bequest.engine.models.reader import Lister, Reader, Shape
from bequest.engine.models.towers.config import VisionConfig
from bequest.engine.models.towers.vit import Affine, Tensors, Vit, activated
from bequest.engine.types.image import Pixels
from bequest.engine.vision.processor import Normalisation

Sent = npt.NDArray[np.uint8] | npt.NDArray[np.int32] | npt.NDArray[np.int64]


class Tower:
    def __init__(self, config: VisionConfig, read: Reader, normalisation: Normalisation, dtype: torch.dtype) -> None:
        self.config = config
        self.dtype = dtype
        tensors = Tensors(read, dtype)
        self._vit = Vit(config.vit, tensors.under("vision."), max(config.projector.layers))
        self._projector = _projector(config, tensors.under("projector."))
        self._shift = read.placed(torch.tensor(normalisation.mean))
        self._std = read.placed(torch.tensor(normalisation.std))
        self._scale = normalisation.scale

    @torch.inference_mode()
    def look(self, pixels: Pixels) -> Tensor:
        """[F, height, width, 3] → [rows, H]"""
        given = sent(pixels, self._shift.device)
        values = (given.to(torch.float32) * self._scale - self._shift) / self._std
        states = self._vit.states(values.permute(0, 3, 1, 2).to(self.dtype).contiguous())
        wanted, first = self.config.projector, self.config.vit.has_class and not self.config.projector.keeps_class
        rows = torch.cat([states[layer][:, int(first) :] for layer in wanted.layers], dim=-1)  # [F, patches, D]
        if wanted.shuffle > 1:
            rows = _shuffled(rows, wanted.shuffle)
        return self._project(rows).flatten(0, 1)

    def look_at_nothing(self, max_patches: int) -> None:
        """A run of the largest size: what it allocates at its peak is what runs need."""
        vit = self.config.vit
        frames = max(1, max_patches // vit.num_positions)
        self.look(np.zeros((frames, vit.image_size, vit.image_size, 3), np.uint8))

    def _project(self, rows: Tensor) -> Tensor:
        first, *second = self._projector
        rows = first(rows)
        if second and self.config.projector.activation is not None:
            rows = second[0](activated(rows, self.config.projector.activation))
        return rows


def sent(array: Sent, device: torch.device) -> Tensor:
    """On the device, without waiting for what it works on."""
    given = torch.from_numpy(array)
    return given if device.type == "cpu" else given.pin_memory().to(device, non_blocking=True)


def _shuffled(rows: Tensor, factor: int) -> Tensor:
    """[F, S · S, D] → [F, S · S / factor², D · factor²]: neighbours in a square of patches become one row."""
    frames, patches, size = rows.shape
    side = int(patches**0.5) // factor
    rows = rows.view(frames, side, factor, side, factor, size).permute(0, 1, 3, 2, 4, 5)
    return rows.reshape(frames, side * side, factor * factor * size)


def _projector(config: VisionConfig, read: Tensors) -> list[Affine]:
    wanted, width = config.projector, config.vit.hidden_size
    columns = width * len(wanted.layers) * wanted.shuffle**2
    if wanted.activation is None:
        return [Affine(read, "proj", config.out_size, columns, has_bias=wanted.has_bias)]
    return [
        Affine(read, "linear_1", config.out_size, columns, has_bias=wanted.has_bias),
        Affine(read, "linear_2", config.out_size, config.out_size, has_bias=wanted.has_bias),
    ]


def expected_tensors(config: VisionConfig) -> dict[str, Shape]:
    """Every tensor that is read, by the names of `towers/names.py`."""
    lister = Lister()
    Tower(config, lister, Normalisation(), torch.float32)
    return lister.shapes
