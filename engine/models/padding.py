"""Heads of any size on kernels of a few fixed ones: each head gets zeros behind its own values.

Zeros change no dot product and give zeros back, which meet zero columns of the output projection. A head norm would
count them: its mean is over the padded size, so its weight is scaled down by √(size / padded) and its eps by
size / padded (DecoderConfig.head_norm_eps), which gives what the unpadded norm gives.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Literal, TypeVar

import torch.nn.functional as F
from torch import Tensor

from bequest.engine.errors import ModelError
from bequest.engine.layers.codes import Codes
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.encoder_decoder_config import EncoderDecoderConfig
from bequest.engine.models.weights import SourceOver, WeightSource

Config = TypeVar("Config", bound=DecoderConfig | EncoderDecoderConfig)


def pad_heads(config: Config, source: WeightSource, sizes: tuple[int, ...]) -> tuple[Config, WeightSource]:
    """The same model with heads of the smallest of `sizes` that holds them."""
    if isinstance(config, DecoderConfig) and config.keeps_by_layer:
        _check_heads(config, sizes)
        return config, source
    padded = min((size for size in sizes if size >= config.head_dim), default=None)
    if padded is None:
        most = max(sizes)
        raise ModelError(f"{config.architecture}: heads of {config.head_dim} are too large, {most} is the most here")
    if padded == config.head_dim:
        return config, source
    if isinstance(config, DecoderConfig) and config.qk_norm and config.style.centred:
        have = ", ".join(map(str, sorted(sizes)))
        raise ModelError(
            f"{config.architecture}: heads of {config.head_dim} with a layer norm; the kernels take {have}"
        )
    padding = padded - config.head_dim
    offset = config.style.norm_offset if isinstance(config, DecoderConfig) else 0.0
    heads = PaddedHeads(source, config.head_dim, padded, norm_offset=offset)
    if isinstance(config, EncoderDecoderConfig):
        encoder = replace(config.encoder, head_dim=padded)
        return replace(config, head_dim=padded, head_padding=padding, encoder=encoder), heads
    return replace(config, head_dim=padded, head_padding=padding), heads


def _check_heads(config: DecoderConfig, sizes: tuple[int, ...]) -> None:
    """Of a model whose layers have heads of two sizes: nothing is padded."""
    others = {config.heads_of(layer).size for layer in range(config.num_layers)} - {*sizes}
    if others:
        have, wanted = (", ".join(map(str, sorted(some))) for some in (sizes, others))
        raise ModelError(f"{config.architecture}: heads of {wanted} (head_dim, global_head_dim); kernels take {have}")


def without_padding(config: Config) -> Config:
    """As the checkpoint has it. Of an encoder-decoder model heads of both stacks are alike."""
    head_dim = config.head_dim - config.head_padding
    if isinstance(config, EncoderDecoderConfig):
        return replace(config, head_dim=head_dim, head_padding=0, encoder=replace(config.encoder, head_dim=head_dim))
    return replace(config, head_dim=head_dim, head_padding=0)


def heads_along(name: str) -> Literal["rows", "columns"] | None:
    """Whether a matrix, or its bias, has heads of an attention, and along which of its sides."""
    if ".linear_attn." in name:  # has heads of its own
        return None
    match name.rsplit(".", 3)[-3:]:
        case ["self_attn", "gate_proj", _]:
            return "rows"
        case [*_, _, ("k_scale" | "v_scale" | "output_scale")]:  # of an fp8 cache
            return None
        case [*_, ("q_proj" | "k_proj" | "v_proj" | "q" | "k" | "v"), _]:
            return "rows"
        case [*_, ("o_proj" | "out_proj" | "o"), "weight"]:
            return "columns"
    return None


class PaddedHeads(SourceOver):
    """A WeightSource over another whose heads are smaller."""

    def __init__(self, source: WeightSource, head_dim: int, padded: int, *, norm_offset: float = 0.0) -> None:
        """`norm_offset`: what is added to the weight of a head norm."""
        super().__init__(source)
        self._head_dim = head_dim
        self._padded = padded
        self._norm_offset = norm_offset

    def names(self) -> Collection[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.load(name).shape)

    def load(self, name: str) -> Tensor:
        tensor = self._source.load(name)
        if ".linear_attn." in name:  # has heads of its own
            return tensor
        along = heads_along(name)
        if along == "rows":
            heads = tensor.unflatten(0, (-1, self._head_dim))  # [heads, D] or [heads, D, K]
            return self._pad(heads, dim=1).flatten(0, 1)
        if along == "columns":
            heads = tensor.unflatten(1, (-1, self._head_dim))  # [H, heads, D]
            return self._pad(heads, dim=2).flatten(1, 2)
        match name.rsplit(".", 2)[-2:]:
            case [("q_norm" | "k_norm"), _]:
                heads = (tensor.float() + self._norm_offset).unflatten(0, (-1, self._head_dim))  # [1, D] or [heads, D]
                scaled = heads * math.sqrt(self._head_dim / self._padded)
                return self._pad(scaled, dim=1).flatten() - self._norm_offset
            case _:
                return tensor

    def load_codes(self, name: str) -> Codes | None:
        return self._source.load_codes(name) if ".mlp." in name else None  # which have no heads

    def _pad(self, tensor: Tensor, dim: int) -> Tensor:
        """Zeros behind dimension `dim`."""
        after = [0, 0] * (tensor.dim() - 1 - dim)
        return F.pad(tensor, [*after, 0, self._padded - self._head_dim])
