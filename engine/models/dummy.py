"""Random weights in place of a checkpoint's, made where they are used: speed can be measured without the files."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from bequest.engine.layers.codes import Codes


class DummySource:
    """A WeightSource. The same name gives the same numbers; they are scaled so that activations stay finite."""

    description = "random weights"
    dtype = torch.bfloat16

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        self._shapes = shapes
        self._device = device

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def load(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if "norm" in name:
            return torch.ones(shape, dtype=self.dtype, device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        values = torch.empty(shape, dtype=self.dtype, device=self._device)
        return values.normal_(0.0, 1.0 / math.sqrt(shape[-1]), generator=generator)

    def load_codes(self, name: str) -> Codes | None:
        return None
