"""GGUF files of Qwen3-Next and Qwen3.5: what their metadata says of recurrent layers, and their tensors as Hugging
Face's checkpoints order them."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from bequest.engine.errors import ModelError
from bequest.engine.kernels.cpu_weights import QuantisedRows
from bequest.engine.layers.codes import Codes
from bequest.engine.models.config import RecurrentConfig
from bequest.engine.models.fields import Fields
from bequest.engine.models.weights import SourceOver, WeightSource
from bequest.engine.types.recurrent import DeltaSizes

# Parts of a recurrent layer. `ssm_in` and `ssm_ba` are Qwen3-Next's own, `ssm_in` in older files alone.
LAYER_NAMES = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}


def parse_gguf_recurrent(fields: Fields, num_layers: int) -> RecurrentConfig:
    value_heads, inner = fields.integer("ssm.time_step_rank"), fields.integer("ssm.inner_size")
    key_heads, interval = fields.integer("ssm.group_count"), fields.integer("full_attention_interval", 4)
    numbers = {"ssm.time_step_rank": value_heads, "ssm.group_count": key_heads, "full_attention_interval": interval}
    for name, number in numbers.items():
        if number < 1:
            raise ModelError(f"{fields.source}: {name} must be positive, not {number}")
    if inner % value_heads or value_heads % key_heads:
        raise ModelError(
            f"{fields.source}: ssm.inner_size = {inner}, ssm.time_step_rank = {value_heads} and ssm.group_count = "
            f"{key_heads} do not divide each other"
        )
    sizes = DeltaSizes(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=fields.integer("ssm.state_size"),
        value_dim=inner // value_heads,
        conv_width=fields.integer("ssm.conv_kernel"),
    )
    return RecurrentConfig(sizes, frozenset(layer for layer in range(num_layers) if (layer + 1) % interval))


class HybridGguf(SourceOver):
    """A WeightSource over a GGUF file, as the checkpoint was that it was made of.

    Qwen3.5's files have value heads in turns: the first of each key head, then the second of each, … Checkpoints have
    all of a key head one after another. Files keep a decay where checkpoints keep its logarithm.
    """

    def __init__(self, source: WeightSource, sizes: DeltaSizes, *, in_turns: bool) -> None:
        super().__init__(source)
        self._sizes = sizes
        self._in_turns = in_turns

    def names(self) -> Collection[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._source.shape(name)
        return (shape[0], 1, *shape[1:]) if name.endswith(".conv1d.weight") else shape

    def load(self, name: str) -> Tensor:
        tensor = self._source.load(name)
        if name.endswith(".A_log"):
            tensor = tensor.float().neg().log()
        if name.endswith(".conv1d.weight"):
            tensor = tensor.unsqueeze(1)
        return self._ordered(name, tensor)

    def load_codes(self, name: str) -> Codes | None:
        codes = self._source.load_codes(name)
        if codes is None or not self._in_turns or ".linear_attn." not in name:
            return codes
        if not isinstance(codes, QuantisedRows):
            return None
        if name.endswith(".out_proj.weight") and self._sizes.value_dim % codes.stored.layout.values:
            return None  # a block of codes would be of two heads
        return QuantisedRows(codes.type, self._ordered(name, codes.rows))

    def _ordered(self, name: str, tensor: Tensor) -> Tensor:
        """With the value heads of each key head together."""
        if not self._in_turns:
            return tensor
        match name.rpartition(".linear_attn.")[2].removesuffix(".weight"):
            case "in_proj_qkv" | "conv1d":
                keys = 2 * self._sizes.key_size
                return torch.cat([tensor[:keys], self._grouped(tensor[keys:], 0)])
            case "in_proj_z" | "in_proj_b" | "in_proj_a" | "A_log" | "dt_bias":
                return self._grouped(tensor, 0)
            case "out_proj":
                return self._grouped(tensor, 1)
        return tensor

    def _grouped(self, tensor: Tensor, dim: int) -> Tensor:
        shared = self._sizes.value_heads // self._sizes.key_heads
        heads: Tensor = tensor.unflatten(dim, (shared, self._sizes.key_heads, -1))
        return heads.transpose(dim, dim + 1).flatten(dim, dim + 2)
