"""Checkpoints whose matrices are joined or ordered otherwise than the dense decoders have them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from bequest.engine.layers.codes import Codes
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.gguf_hybrids import HybridGguf
from bequest.engine.models.gguf_registry import find_gguf_variant
from bequest.engine.models.hybrid_names import HybridNames
from bequest.engine.models.registry import HF_ARCHITECTURES
from bequest.engine.models.rope import pair_halves
from bequest.engine.models.text_part import text_part
from bequest.engine.models.weights import SourceOver, WeightSource


def respelled(source: WeightSource, config: DecoderConfig) -> WeightSource:
    """The tensors of a Hugging Face checkpoint as the dense decoders name and order them."""
    variant = HF_ARCHITECTURES[config.architecture]
    if variant.recurrent:
        return HybridNames(source, config)
    joined = {name: _JOINED[name](config) for name in variant.joined}
    turned = _heads_of(config) if variant.rope.interleaved else {}
    text = text_part(source) if variant.part_of or config.vision is not None else source
    return RespelledSource(text, joined, turned, config.rotary_dim) if joined or turned else text


def _heads_of(config: DecoderConfig) -> dict[str, int]:
    """Heads of all that a rotation follows."""
    names = ("proj", "norm") if config.qk_norm and config.style.centred else ("proj",)
    counts = {"q": config.num_heads, "k": config.num_kv_heads}
    return {f"{part}_{name}": count for part, count in counts.items() for name in names}


def respelled_gguf(source: WeightSource, config: DecoderConfig) -> WeightSource:
    """The same of a GGUF file, whose source turns rows itself."""
    variant = find_gguf_variant(config.architecture)
    if config.recurrent is not None:
        in_order = HybridGguf(source, config.recurrent.sizes, in_turns=variant.recurrent == "in_turns")
        return HybridNames(in_order, config)
    joined = {name: _JOINED[name](config) for name in variant.joined}
    return RespelledSource(source, joined, {}, config.rotary_dim) if joined else source


_JOINED = {
    "qkv_proj": lambda config: {"q_proj": config.q_size, "k_proj": config.kv_size, "v_proj": config.kv_size},
    "gate_up_proj": lambda config: {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size},
}


class RespelledSource(SourceOver):
    """A WeightSource over another.

    `joined`: matrices that hold others one below the other, and the rows of each; `turned`: what has so many heads
    [heads D, …], or a norm's weight [heads, D], whose rotation pairs neighbours, which become pairs of halves.
    """

    def __init__(
        self,
        source: WeightSource,
        joined: Mapping[str, Mapping[str, int]],
        turned: Mapping[str, int],
        rotary_dim: int,
    ) -> None:
        super().__init__(source)
        self._joined = joined
        self._turned = turned
        self._rotary_dim = rotary_dim
        self._places: dict[str, tuple[str, slice | None]] = {}  # name → the stored one, and which rows of it
        for stored in source.names():
            self._places |= _parts_of(stored, joined)

    def names(self) -> Collection[str]:
        return self._places.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        stored, rows = self._places[name]
        count, *others = self._source.shape(stored)
        if rows is None:
            return (count, *others)
        # The last part has all the rows that are left: a wrong number shows there.
        return (len(range(count)[rows]), *others)

    def load(self, name: str) -> Tensor:
        stored, rows = self._places[name]
        tensor = self._source.load(stored)
        part = tensor if rows is None else tensor[rows]
        heads = self._turned.get(name.rsplit(".", 2)[-2]) if "." in name else None
        if heads is None:
            return part
        if part.shape[0] == heads:
            return pair_halves(part.flatten(), heads, self._rotary_dim).view(part.shape)
        return pair_halves(part, heads, self._rotary_dim)

    def load_codes(self, name: str) -> Codes | None:
        stored, rows = self._places[name]
        codes = None if self._turned else self._source.load_codes(stored)
        return codes if codes is None or rows is None else codes.take(rows)

    def name_in_file(self, name: str) -> str:
        prefix, part, kind = ("", "", *name.rsplit(".", 2))[-3:]
        joined = next((matrix for matrix, parts in self._joined.items() if part in parts), part)
        return self._source.name_in_file(f"{prefix}.{joined}.{kind}" if joined != part else name)


def _parts_of(stored: str, joined: Mapping[str, Mapping[str, int]]) -> dict[str, tuple[str, slice | None]]:
    """The names that a stored tensor is read by."""
    prefix, matrix, kind = ("", *stored.rsplit(".", 2))[-3:] if stored.count(".") else ("", "", stored)
    if matrix not in joined:
        return {stored: (stored, None)}
    found: dict[str, tuple[str, slice | None]] = {}
    begin = 0
    parts = joined[matrix]
    for number, (name, rows) in enumerate(parts.items()):
        end = None if number == len(parts) - 1 else begin + rows
        found[f"{prefix}.{name}.{kind}"] = (stored, slice(begin, end))
        begin += rows
    return found
