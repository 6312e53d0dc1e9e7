"""What the server and the scheduler need to know of the loaded model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from bequest.engine.errors import InvalidRequest
from bequest.engine.types.encoder import EncoderInfo
from bequest.engine.types.hidden import Stack, StatesDType
from bequest.engine.types.image import VisionInfo
from bequest.engine.types.speculation import DraftCosts


@dataclass(frozen=True, slots=True)
class Numbers:
    """What a model computes in and what its weights are kept in, beside their dtype."""

    kv_cache_dtype: str = ""
    cpu_matmul: Literal["exact", "fast"] | None = None  # how a CPU multiplies codes; None: there are none
    weight_bytes: Mapping[str, int] = field(default_factory=dict)  # on all devices, by what they are kept in
    weight_files: Literal["safetensors", "gguf", "pt"] = "safetensors"  # that they were read from


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the server and the scheduler need to know of the loaded model."""

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    num_parameters: int
    default_sampling: dict[str, float | int] = field(default_factory=dict)  # from generation_config.json
    num_layers: int = 0  # L
    hidden_size: int = 0  # H
    states_dtype: StatesDType = "float32"  # what hidden states are computed in
    encoder: EncoderInfo | None = None  # of an encoder-decoder model
    numbers: Numbers = Numbers()
    vision: VisionInfo | None = None  # of a model that sees
    drafts: DraftCosts | None = None  # None: the device checks no drafts

    @property
    def kv_cache_dtype(self) -> str:
        return self.numbers.kv_cache_dtype

    @property
    def arithmetic(self) -> str:
        """What keys and values are computed in: those of another arithmetic have other bits."""
        return f"{self.dtype}, codes as integers" if self.numbers.cpu_matmul == "fast" else self.dtype

    def check_tokens(self, *parts: Iterable[int]) -> None:
        """A tokenizer may know tokens that its model has no row for: computing one would be the end of everybody's
        step."""
        wrong = max(max(part, default=0) for part in parts)
        if wrong >= self.vocab_size:
            raise InvalidRequest(
                f"The model has no token {wrong}: its tokens are 0 to {self.vocab_size - 1}.",
                reason="token_unknown",
                token=wrong,
                last=self.vocab_size - 1,
            )

    def num_layers_of(self, stack: Stack) -> int:
        """REQUIRES: there is such a stack"""
        if stack == "decoder":
            return self.num_layers
        assert self.encoder is not None
        return self.encoder.num_layers
