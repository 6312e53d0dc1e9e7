"""A model cut into parts, one for each rank: which rows or columns of which tensor are whose.

    attention       heads of queries, with the heads of keys and values that they meet; columns of the output matrix
    feed-forward    inner features, of every expert too: rows of the first matrices, columns of the last one
    recurrent       heads of keys, with the heads of values that share them
    vocabulary      tokens, as even as can be (engine/layers/vocabulary.py)

A rank then runs a model like any other, with fewer heads and narrower layers. What its mixers give is a part of a sum
(engine/layers/ranks.py). The bias of a matrix whose columns were cut is in the first rank's part alone. Norms and the
choice of experts are whole on every rank.

No torch here: a start checks that a model can be cut before it waits for torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from bequest.engine.errors import ModelError
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.encoder_decoder_config import EncoderDecoderConfig
from bequest.engine.models.vocabulary_names import VOCABULARY
from bequest.engine.types.recurrent import DeltaSizes

Whole = DecoderConfig | EncoderDecoderConfig

# Of names of tensors, the matrix and what it belongs to.
_INNER = frozenset({"gate_proj", "up_proj", "fc1", "wi", "wi_0", "wi_1"})
_INNER_OUT = frozenset({"down_proj", "fc2", "wo"})
_QUERIES = frozenset({"q_proj", "gate_proj", "q"})
_KEYS = frozenset({"k_proj", "v_proj", "k", "v"})
_GATHERED_OUT = frozenset({"o_proj", "out_proj", "o"})
_ATTENTIONS = frozenset({"self_attn", "encoder_attn", "SelfAttention", "EncDecAttention"})

_KINDS = frozenset({"weight", "bias", "sinks", "A_log", "dt_bias"})  # how names end; others are scales of something

Along = Literal["rows", "columns", "first", "vocabulary"]


@dataclass(frozen=True, slots=True)
class Cut:
    """Of a tensor. rows, columns: these parts of it, one after another; first: the first rank has it, others zeros;
    vocabulary: rows, of which the last rank may have fewer."""

    along: Along
    parts: tuple[slice, ...] = ()


@dataclass(frozen=True, slots=True)
class Heads:
    """Those of a rank among all."""

    total: int
    first: int
    count: int

    def slice_of(self, size: int) -> slice:
        """Of so many rows of all heads."""
        rows = size // self.total
        return slice(self.first * rows, (self.first + self.count) * rows)


@dataclass(frozen=True, slots=True)
class Cutting:
    """A whole model, and which part of it a rank has. Raises ModelError where it cannot be cut so."""

    whole: Whole
    rank: int
    size: int

    def __post_init__(self) -> None:
        if isinstance(self.whole, DecoderConfig) and self.whole.keeps_by_layer:
            raise ModelError(f"tensor_parallel_size={self.size}: {self.whole.architecture} is not cut into parts")
        for what, count in self._shared_out().items():
            if count % self.size:
                raise ModelError(f"{self._told(count, what)}, which {self.size} ranks cannot share evenly")
        for what, count in self._shared_by_several().items():
            if count % self.size and self.size % count:
                raise ModelError(f"{self._told(count, what)}; take a divisor or a multiple of it")

    def _told(self, count: int, what: str) -> str:
        return f"tensor_parallel_size={self.size}: {self.whole.architecture} has {count} {what}"

    def _shared_by_several(self) -> dict[str, int]:
        """What queries share: where there are more ranks than these, several ranks have the same one."""
        found = {"heads of keys and values": self.whole.num_kv_heads} if self.cuts_heads else {}
        if isinstance(self.whole, DecoderConfig) and self.whole.recurrent is not None:
            found["heads of recurrent keys"] = self.whole.recurrent.sizes.key_heads
        return found

    def _shared_out(self) -> dict[str, int]:
        whole = self.whole
        found = {"heads": whole.num_heads} if self.cuts_heads else {}
        found["inner features"] = whole.intermediate_size
        if isinstance(whole, EncoderDecoderConfig):
            encoder = whole.encoder
            return found | {"encoder heads": encoder.num_heads, "inner encoder features": encoder.intermediate_size}
        if whole.experts is not None:
            found["inner features of an expert"] = whole.experts.intermediate_size
            found["inner features of shared experts"] = whole.experts.shared_size
            if len(whole.experts.layers) == whole.num_layers:
                del found["inner features"]  # no layer has them
        if whole.recurrent is not None:
            found["heads of recurrent values"] = whole.recurrent.sizes.value_heads
        return found

    @property
    def cuts_heads(self) -> bool:
        """A norm over all heads of a token, or one with a weight for each, has all of them: such an attention is whole
        on every rank."""
        if not isinstance(self.whole, DecoderConfig) or not self.whole.qk_norm:
            return True
        return not (self.whole.style.qk_norm_over_rows or self.whole.style.centred)

    @property
    def heads(self) -> Heads:
        """Of keys and values, where the cache has them."""
        total = self.whole.num_kv_heads
        if not self.cuts_heads:
            return Heads(total, 0, total)
        return self._shared_heads(total)

    def _shared_heads(self, total: int) -> Heads:
        return Heads(total, self.rank * total // self.size, max(1, total // self.size))

    @property
    def config(self) -> Whole:
        """Of the rank's part: heads and inner features are its own, the vocabulary is that of all."""
        whole = self.whole
        if isinstance(whole, EncoderDecoderConfig):
            encoder = replace(
                whole.encoder,
                num_heads=whole.encoder.num_heads // self.size,
                intermediate_size=whole.encoder.intermediate_size // self.size,
            )
            heads, inner = whole.num_heads // self.size, whole.intermediate_size // self.size
            return replace(whole, num_heads=heads, intermediate_size=inner, encoder=encoder)
        return self._decoder(whole)

    def _decoder(self, whole: DecoderConfig) -> DecoderConfig:
        size, experts, recurrent = self.size, whole.experts, whole.recurrent
        if experts is not None:
            inner, shared = experts.intermediate_size // size, experts.shared_size // size
            experts = replace(experts, intermediate_size=inner, shared_size=shared)
        if recurrent is not None:
            keys, values = self._shared_heads(recurrent.sizes.key_heads).count, recurrent.sizes.value_heads // size
            recurrent = replace(recurrent, sizes=replace(recurrent.sizes, key_heads=keys, value_heads=values))
        return replace(
            whole,
            num_heads=whole.num_heads // size if self.cuts_heads else whole.num_heads,
            num_kv_heads=self.heads.count,
            intermediate_size=max(1, whole.intermediate_size // size),
            experts=experts,
            recurrent=recurrent,
        )

    def of(self, name: str, shape: tuple[int, ...]) -> Cut | None:
        """How the whole tensor of this name and shape is cut; None: every rank has it whole."""
        module, _, kind = name.rpartition(".")
        if kind not in _KINDS:
            return None
        if module in VOCABULARY:
            return Cut("vocabulary")
        parent, _, matrix = module.rpartition(".")
        parent = parent.rpartition(".")[2]
        if parent == "linear_attn" or matrix == "linear_attn":
            return self._recurrent(matrix if parent == "linear_attn" else kind, kind, shape)
        if kind == "sinks":
            return self._even(shape[0]) if self.cuts_heads else None
        if matrix == "relative_attention_bias":
            return replace(self._even(shape[1]), along="columns")
        if parent in _ATTENTIONS:
            return self._attention(matrix, kind, shape) if self.cuts_heads else None
        if matrix in _INNER:
            return self._even(shape[0])
        return self._output(kind, shape) if matrix in _INNER_OUT else None

    def _attention(self, matrix: str, kind: str, shape: tuple[int, ...]) -> Cut | None:
        if matrix in _QUERIES:
            return self._even(shape[0])
        if matrix in _KEYS:
            return Cut("rows", (self.heads.slice_of(shape[0]),))
        return self._output(kind, shape) if matrix in _GATHERED_OUT else None

    def _recurrent(self, matrix: str, kind: str, shape: tuple[int, ...]) -> Cut | None:
        assert isinstance(self.whole, DecoderConfig) and self.whole.recurrent is not None
        if matrix in ("in_proj_qkv", "conv1d"):
            return Cut("rows", self.channels(self.whole.recurrent.sizes))
        if matrix == "out_proj":
            return self._output(kind, shape)
        return None if matrix == "norm" else self._even(shape[0])

    def channels(self, sizes: DeltaSizes) -> tuple[slice, ...]:
        """Of queries, keys and values that a recurrent layer reads."""
        keys = self._shared_heads(sizes.key_heads).slice_of(sizes.key_size)
        queries, keys = keys, slice(keys.start + sizes.key_size, keys.stop + sizes.key_size)
        return (queries, keys, self._even_part(sizes.value_size, 2 * sizes.key_size))

    def _output(self, kind: str, shape: tuple[int, ...]) -> Cut:
        """Of a matrix that ends a mixer, and of its bias."""
        return replace(self._even(shape[1]), along="columns") if kind == "weight" else Cut("first")

    def _even(self, count: int) -> Cut:
        return Cut("rows", (self._even_part(count),))

    def _even_part(self, count: int, begin: int = 0) -> slice:
        each = count // self.size
        return slice(begin + self.rank * each, begin + (self.rank + 1) * each)
