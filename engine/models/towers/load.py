"""Loads what a model sees with: its tower, and the processor that prepares images for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from bequest.engine.layers.backend import Backend
from bequest.engine.models.dummy import DummySource
from bequest.engine.models.reader import Loader
from bequest.engine.models.towers.config import VisionConfig
from bequest.engine.models.towers.names import vision_part
from bequest.engine.models.towers.processors import read_processor
from bequest.engine.models.towers.tower import Tower, expected_tensors
from bequest.engine.models.weights import WeightSource, check_shapes
from bequest.engine.types.image import VisionInfo
from bequest.engine.vision.processor import Processor


@dataclass(frozen=True, slots=True)
class Sight:
    tower: Tower
    processor: Processor
    num_parameters: int

    @property
    def num_bytes(self) -> int:
        return self.num_parameters * self.tower.dtype.itemsize

    @property
    def info(self) -> VisionInfo:
        config, processor = self.tower.config, self.processor
        return VisionInfo(
            config.image_token_id if config.place is None else config.place.token_id,
            processor.prepare,
            processor.max_tokens,
            turns=bool(config.axes),
            pixels=processor.pixel_bounds,
            states_per_row=1 + config.num_deep,
            row_token=config.image_token_id,
            around=None if config.place is None else (config.place.before, config.place.behind),
            together=config.together,
            settings=repr(processor),
            fits=processor.fits,
        )


def load_sight(
    directory: Path, config: VisionConfig, source: WeightSource | None, backend: Backend, dtype: torch.dtype
) -> Sight:
    """`source`: of the whole checkpoint; None: random weights. Raises ModelError."""
    processor, expected = read_processor(directory, config), expected_tensors(config)
    if source is None:
        part: WeightSource = DummySource(expected, backend.device)
    else:
        part = vision_part(source)
        check_shapes(part, [name for name in part.names() if name in expected], expected, config.architecture)
    computes_in = torch.float32 if backend.device.type == "cpu" else dtype
    tower = Tower(config, Loader(part, backend, dtype), processor.normalisation, computes_in, backend.ops)
    return Sight(tower, processor, sum(map(math.prod, expected.values())))
