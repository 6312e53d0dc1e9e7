"""The least that a decode step moves through the memory of a device, by the description of its model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.families.decoders import expected_tensors

_FLOAT32 = 4  # bytes; states of recurrent layers are kept in it


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One token for each of `batch` sequences that have `context` tokens."""

    batch: int
    context: int
    weight_itemsize: int = 2
    kv_itemsize: int = 2
    in_codes: bool = False  # layers have one byte for each weight

    def bytes(self, config: DecoderConfig) -> float:
        return self.weight_bytes(config) + self.kv_bytes(config) + self.state_bytes(config)

    def weight_bytes(self, config: DecoderConfig) -> float:
        """Of experts those that are used, where each token takes any of them; of a table that is not the output matrix
        a row for each token."""
        shapes = expected_tensors(config)
        parameters = sum(math.prod(shape) for shape in shapes.values())
        if not config.tie_word_embeddings:
            parameters -= math.prod(shapes["model.embed_tokens.weight"]) - self.batch * config.hidden_size
        if config.experts is not None:
            of_all = sum(math.prod(shape) for name, shape in shapes.items() if ".mlp.experts." in name)
            parameters -= of_all * (1 - config.experts.top_k / config.experts.num_experts) ** self.batch
        layers = sum(math.prod(shape) for name, shape in shapes.items() if ".layers." in name)
        return self.weight_itemsize * parameters - (layers * (self.weight_itemsize - 1) if self.in_codes else 0)

    def kv_bytes(self, config: DecoderConfig) -> float:
        """Layers with a window read no more than it."""
        recurrent = frozenset() if config.recurrent is None else config.recurrent.layers
        windows = [window for layer, window in enumerate(config.sliding_windows) if layer not in recurrent]
        tokens = sum(min(window or self.context, self.context) for window in windows)
        return self.batch * tokens * 2 * config.kv_size * self.kv_itemsize

    def state_bytes(self, config: DecoderConfig) -> float:
        """Read once and written once."""
        return 2 * self.batch * math.prod(config.state_shape) * _FLOAT32
