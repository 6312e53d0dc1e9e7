"""Where tensors come from, by the names of Hugging Face checkpoints; loaders of other formats translate theirs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bequest.engine.errors import ModelError
from bequest.engine.kernels.cpu_weights import QuantisedRows
from bequest.engine.models.config import DecoderConfig

MOST_NAMED = 10  # tensors that an error lists


class WeightSource(Protocol):
    """An open checkpoint. May be read from several threads."""

    @property
    def description(self) -> str:
        """The file or directory, for errors."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """What the checkpoint's matrices are stored in; float32 where that is a quantised format."""
        ...

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def load(self, name: str) -> Tensor:
        """The tensor, in any float type; may be a view of the file."""
        ...

    def load_codes(self, name: str) -> QuantisedRows | None:
        """A matrix in the codes of the file, where it is quantised in a way that kernels read; else None."""
        ...


@dataclass(frozen=True, slots=True)
class PrefixedSource:
    """A WeightSource whose `bare` names get a prefix."""

    source: WeightSource
    prefix: str
    bare: frozenset[str]

    @property
    def description(self) -> str:
        return self.source.description

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    def names(self) -> Collection[str]:
        return {self.prefix + name if name in self.bare else name for name in self.source.names()}

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(self._own(name))

    def load(self, name: str) -> Tensor:
        return self.source.load(self._own(name))

    def load_codes(self, name: str) -> QuantisedRows | None:
        return self.source.load_codes(self._own(name))

    def _own(self, name: str) -> str:
        bare = name.removeprefix(self.prefix)
        return bare if bare in self.bare else name


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def expected_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model and its shape."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        shapes |= {layer_prefix(layer) + name: shape for name, shape in _layer_tensors(config).items()}
    return shapes


def _layer_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    projections = {  # name: (rows, columns, has a bias)
        "self_attn.q_proj": (config.q_size, hidden, config.attention_bias),
        "self_attn.k_proj": (config.kv_size, hidden, config.attention_bias),
        "self_attn.v_proj": (config.kv_size, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, config.q_size, config.attention_output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    for name, (rows, columns, has_bias) in projections.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes


def check_tensors(source: WeightSource, config: DecoderConfig) -> None:
    """Refuses a checkpoint that lacks a tensor, has one nobody would read, or one of another shape."""
    present = [name for name in source.names() if not _is_harmless(name, config)]
    check_shapes(source, present, expected_tensors(config), config.architecture)


def check_shapes(
    source: WeightSource, names: Collection[str], expected: Mapping[str, tuple[int, ...]], architecture: str
) -> None:
    """The same of those `names` in the checkpoint that are not to be overlooked."""
    present = set(names)
    faults = [f"{name} is missing" for name in expected if name not in present]
    faults += [f"{name} is not a tensor of this architecture" for name in sorted(present - expected.keys())]
    for name, shape in expected.items():
        if name in present and source.shape(name) != shape:
            faults.append(f"{name} has shape {list(source.shape(name))}, not {list(shape)}")
    if faults:
        more = [f"and {len(faults) - MOST_NAMED} more"] if len(faults) > MOST_NAMED else []
        listed = "; ".join([*faults[:MOST_NAMED], *more])
        raise ModelError(f"{source.description} does not fit {architecture} as configured: {listed}")


# What checkpoints call the scales of an fp8 cache (engine.models.kv_scales) and of products that stay in float here.
_SCALES = ("k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale", "k_proj.output_scale", "v_proj.output_scale")


def _is_harmless(name: str, config: DecoderConfig) -> bool:
    """Old checkpoints hold buffers that we compute; some hold the tied output matrix a second time; some have scales
    for a cache that may be one of another dtype."""
    if ".self_attn." in name and name.endswith(tuple(f".{scale}" for scale in _SCALES)):
        return True
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")
