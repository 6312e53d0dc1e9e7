"""A model that is ready to run, and what is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from bequest.engine.layers.backend import MatMul
from bequest.engine.models.any_config import ModelConfig
from bequest.engine.models.any_model import Model
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.cutting import Cutting
from bequest.engine.models.generation import GenerationDefaults
from bequest.engine.models.reader import Matrix
from bequest.engine.models.towers.load import Sight
from bequest.engine.models.towers.tower import Tower


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Model
    config: ModelConfig
    generation: GenerationDefaults
    dtype: torch.dtype  # of the weights' values
    formats: tuple[str, ...]  # that the matrices are kept in: this dtype, or codes of a quantised file
    notes: tuple[str, ...]  # which layers run kernel by kernel, and why
    kv_dtype: torch.dtype  # of the cache
    max_model_len: int
    num_parameters: int
    bytes_by_format: Mapping[str, int]  # of all matrices and tables
    sight: Sight | None = None  # of a model that sees
    matrices: Mapping[str, Matrix] = field(default_factory=dict)  # of its layers, which adapters can add to
    matmul: MatMul | None = None  # how a CPU multiplies codes; None: there are none
    cutting: Cutting | None = None  # into parts, of which this is one; None: it is whole
    without_graphs: str | None = None  # why a GPU's steps cannot be captured; None: they can

    @property
    def weight_bytes(self) -> int:
        return sum(self.bytes_by_format.values())

    @property
    def tower(self) -> Tower | None:
        return None if self.sight is None else self.sight.tower

    @property
    def architecture(self) -> str:
        vision = self.config.vision if isinstance(self.config, DecoderConfig) else None
        return self.config.architecture if vision is None else vision.architecture

    @property
    def num_active_parameters(self) -> int:
        """Those that one token meets."""
        config = self.config if self.cutting is None else self.cutting.whole
        if not isinstance(config, DecoderConfig) or config.experts is None:
            return self.num_parameters
        return self.num_parameters - config.experts.num_idle(config.hidden_size)
