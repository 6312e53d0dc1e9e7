"""A checkpoint of another format than Hugging Face's, described in its words: what its files would say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bequest.engine.models.weights import WeightSource


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint:
    config: Mapping[str, object]  # config.json
    generation: Mapping[str, object]  # generation_config.json
    source: WeightSource
