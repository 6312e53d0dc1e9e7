"""Checkpoints of Qwen3-Next and Qwen3.5 as the decoders name and order their tensors.

Queries of an attention come with their gates, head by head. Qwen3-Next joins what a recurrent layer projects, key head
by key head. A model that sees pictures, too, has its decoder one level deeper.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from bequest.engine.kernels.cpu_weights import QuantisedRows
from bequest.engine.layers.codes import Codes
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.file_names import name_by_others
from bequest.engine.models.weights import SourceOver, WeightSource
from bequest.engine.types.recurrent import DeltaSizes

_TOWER = "model.visual."
# Parts of a checkpoint that are no part of the decoder.
_LEFT_OUT = {"mtp.": "a head that drafts: speculative=mtp loads it", _TOWER: "what sees pictures"}
_DEEPER = "model.language_model."


def left_out(names: Collection[str], *, sees: bool = False) -> tuple[str, ...]:
    """For people: what a checkpoint has and nobody reads. `sees`: pictures are seen."""
    parts = [prefix for prefix in _LEFT_OUT if prefix != _TOWER or not sees]
    counts = {prefix: sum(name.startswith(prefix) for name in names) for prefix in parts}
    return tuple(
        f"{count} tensors of {prefix}* are no part of the decoder ({_LEFT_OUT[prefix]})"
        for prefix, count in counts.items()
        if count
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of ours, as some rows of a stored one."""

    stored: str
    num_rows: int | None = None  # None: all
    make: Callable[[Tensor], Tensor] = lambda tensor: tensor


class HybridNames(SourceOver):
    """A WeightSource over a checkpoint of these families."""

    def __init__(self, source: WeightSource, config: DecoderConfig) -> None:
        super().__init__(source)
        assert config.recurrent is not None
        self._parts: dict[str, _Part] = {}
        for stored in source.names():
            if not stored.startswith(tuple(_LEFT_OUT)):
                name = "model." + stored.removeprefix(_DEEPER) if stored.startswith(_DEEPER) else stored
                self._parts |= _parts_of(name, stored, config, config.recurrent.sizes)

    def names(self) -> Collection[str]:
        return self._parts.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        part = self._parts[name]
        count, *others = self._source.shape(part.stored)
        return (count if part.num_rows is None else part.num_rows, *others)

    def load(self, name: str) -> Tensor:
        part = self._parts[name]
        return part.make(self._source.load(part.stored))

    def load_codes(self, name: str) -> Codes | None:
        """Of a GGUF file: rows can be put in another order. Scales of other formats are of several rows."""
        part = self._parts[name]
        codes = self._source.load_codes(part.stored)
        return QuantisedRows(codes.type, part.make(codes.rows)) if isinstance(codes, QuantisedRows) else None

    def name_in_file(self, name: str) -> str:
        own = name.replace(".self_attn.gate_proj.", ".self_attn.q_proj.")
        return self._source.name_in_file(name_by_others(own, {ours: part.stored for ours, part in self._parts.items()}))


def _parts_of(name: str, stored: str, config: DecoderConfig, sizes: DeltaSizes) -> dict[str, _Part]:
    prefix, matrix, kind = ("", "", *name.rsplit(".", 2))[-3:]
    if matrix == "q_proj":
        counts = {"q_proj": config.head_dim, "gate_proj": config.head_dim}
        num_groups = config.num_heads
    elif matrix == "in_proj_qkvz":
        values = sizes.value_size // sizes.key_heads
        counts = {"q": sizes.key_dim, "k": sizes.key_dim, "v": values, "in_proj_z": values}
        num_groups = sizes.key_heads
    elif matrix == "in_proj_ba":
        shared = sizes.value_heads // sizes.key_heads
        counts = {"in_proj_b": shared, "in_proj_a": shared}
        num_groups = sizes.key_heads
    else:
        return {name: _Part(stored)}
    ranges = _ranges(counts)
    found = {
        f"{prefix}.{part}.{kind}": _Part(stored, num_groups * len(rows), _rows_of_groups(num_groups, [rows]))
        for part, rows in ranges.items()
        if part not in ("q", "k", "v")
    }
    if matrix == "in_proj_qkvz":
        mixed = [ranges[part] for part in ("q", "k", "v")]
        count = num_groups * sum(map(len, mixed))
        found[f"{prefix}.in_proj_qkv.{kind}"] = _Part(stored, count, _rows_of_groups(num_groups, mixed))
    return found


def _ranges(counts: dict[str, int]) -> dict[str, range]:
    """Rows of each part in a group of so many."""
    found, begin = {}, 0
    for name, count in counts.items():
        found[name] = range(begin, begin + count)
        begin += count
    return found


def _rows_of_groups(num_groups: int, ranges: list[range]) -> Callable[[Tensor], Tensor]:
    """Of a tensor whose rows are so many groups: these rows of every group, then those, …"""

    def take(tensor: Tensor) -> Tensor:
        groups = tensor.unflatten(0, (num_groups, -1))
        return torch.cat([groups[:, rows.start : rows.stop].flatten(0, 1) for rows in ranges])

    return take
