"""Who computes a model: a family of our own, or the transformers library over our cache. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from bequest.engine.config import EngineConfig
from bequest.engine.models.hf_encoder_decoder import PARSERS
from bequest.engine.models.registry import HF_ARCHITECTURES
from bequest.engine.models.towers.hf_towers import SEEING

ModelImpl = Literal["auto", "bequest", "transformers"]


@dataclass(frozen=True, slots=True)
class Implementation:
    """What the user wants: `auto` takes transformers for an architecture that we lack."""

    name: ModelImpl = "auto"
    trust_remote_code: bool = False  # Python files of a checkpoint may run

    @classmethod
    def of(cls, config: EngineConfig) -> Implementation:
        return cls(config.model_impl, config.trust_remote_code)

    def is_transformers(self, values: Mapping[str, object]) -> bool:
        """Whether transformers computes the model of this config.json."""
        if self.name != "auto":
            return self.name == "transformers"
        return not _is_own(values) and "model_type" in values


AUTO = Implementation()


def _is_own(values: Mapping[str, object]) -> bool:
    named = values.get("architectures")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    known = HF_ARCHITECTURES.keys() | PARSERS.keys() | SEEING.keys()
    return any(name in known or name.endswith("EncoderModel") for name in names)
