"""Random weights in place of a checkpoint's, made where they are used: speed can be measured without the files."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from bequest.engine.formats import mxfp4
from bequest.engine.layers.codes import Codes
from bequest.engine.models.gpt_oss_names import mxfp4_rows

_CODES = 16  # of MXFP4
_SPREAD = 2.9  # of its numbers, where all codes are as frequent, before they are scaled


class DummySource:
    """A WeightSource. The same name gives the same numbers; they are scaled so that activations stay finite."""

    description = "random weights"
    dtype = torch.bfloat16

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], device: torch.device, *, experts_in_mxfp4: bool = False
    ) -> None:
        self._shapes = shapes
        self._device = device
        self._experts_in_mxfp4 = experts_in_mxfp4

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def load(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if "norm" in name:
            return torch.ones(shape, dtype=self.dtype, device=self._device)
        values = torch.empty(shape, dtype=self.dtype, device=self._device)
        return values.normal_(0.0, 1.0 / math.sqrt(shape[-1]), generator=self._generator(name))

    def load_codes(self, name: str) -> Codes | None:
        shape = self._shapes[name]
        if not self._experts_in_mxfp4 or ".mlp.experts." not in name or len(shape) != 2:
            return None
        blocks = (shape[0], shape[1] // mxfp4.GROUP, mxfp4.GROUP // 2)
        pairs = torch.randint(_CODES**2, blocks, generator=self._generator(name), device=self._device)
        exponent = round(-math.log2(_SPREAD * math.sqrt(shape[1])))
        return mxfp4_rows(pairs, torch.full(blocks[:2], mxfp4.BIAS + exponent, device=self._device))

    def name_in_file(self, name: str) -> str:
        return name

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
