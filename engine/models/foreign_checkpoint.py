"""A checkpoint of another format than Hugging Face's, described in its words: what its files would say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bequest.engine.models.weights import WeightSource


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint:
    config: dict[str, Any]  # config.json
    generation: dict[str, Any]  # generation_config.json
    source: WeightSource
