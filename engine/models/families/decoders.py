"""The decoders: which tensors each has, and what computes it. They differ in their layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bequest.engine.layers.spec import LayerSpec
from bequest.engine.layers.start import TokenInputs
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.decoder import DecoderParts
from bequest.engine.models.families import dense, gemma4
from bequest.engine.models.families.parts import Ropes, model_norm
from bequest.engine.models.reader import Lister, Reader, Shape
from bequest.engine.models.weights import WeightSource, check_shapes


def _nothing(_config: DecoderConfig, _read: Reader) -> None:
    return None


def _reads_all(_config: DecoderConfig, _name: str) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class DecoderFamily:
    describe_layer: Callable[[DecoderConfig, Reader, Ropes, int], LayerSpec]
    # What every layer gets of each token beside the stream; None: nothing.
    describe_inputs: Callable[[DecoderConfig, Reader], TokenInputs | None] = _nothing
    # Whether a checkpoint may have a tensor of that name that nobody reads.
    is_unread: Callable[[DecoderConfig, str], bool] = _reads_all


_DENSE = DecoderFamily(dense.describe_layer)
_GEMMA4 = DecoderFamily(gemma4.describe_layer, gemma4.describe_inputs, gemma4.is_unread)


def family_of(config: DecoderConfig) -> DecoderFamily:
    return _DENSE if config.gemma4 is None else _GEMMA4


def describe(config: DecoderConfig, read: Reader, num_positions: int) -> DecoderParts:
    vocabulary, hidden, factor = config.vocab_size, config.hidden_size, config.embedding_factor
    table = read.weight("model.embed_tokens", vocabulary, hidden)
    ropes = Ropes(config, read, num_positions)
    return DecoderParts(
        table,
        read.each(partial(_numbered_layer, config, read, ropes), config.num_layers),
        model_norm(config, read, "model.norm"),
        table if config.tie_word_embeddings else read.weight("lm_head", vocabulary, hidden),
        start_factor=read.rounded(factor) if config.rounds_embedding_factor else factor,
        scales_overlay=not config.rounds_embedding_factor,  # Gemma's table has the factor, Granite's model
        logits_divisor=config.logits_divisor,
        logits_cap=config.logits_cap,
        turns=ropes.turns,
        inputs=family_of(config).describe_inputs(config, read),
    )


def _numbered_layer(config: DecoderConfig, read: Reader, ropes: Ropes, index: int) -> LayerSpec:
    return family_of(config).describe_layer(config, read.under(layer_prefix(index)), ropes, index)


def layer_prefix(index: int) -> str:
    return f"model.layers.{index}."


def expected_tensors(config: DecoderConfig) -> dict[str, Shape]:
    """Every tensor of the model and its shape."""
    lister = Lister()
    describe(config, lister, num_positions=1)
    return lister.shapes


def check_tensors(source: WeightSource, config: DecoderConfig) -> None:
    """Refuses a checkpoint as `check_shapes` does."""
    present = [name for name in source.names() if not _is_harmless(name, config)]
    check_shapes(source, present, expected_tensors(config), config.architecture)


# What checkpoints call the scales of an fp8 cache (engine.models.kv_scales) and of products that stay in float here.
_SCALES = ("k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale", "k_proj.output_scale", "v_proj.output_scale")


def _is_harmless(name: str, config: DecoderConfig) -> bool:
    """Old checkpoints hold buffers that we compute; some hold the tied output matrix a second time; some have scales
    for a cache that may be one of another dtype."""
    if ".self_attn." in name and name.endswith(tuple(f".{scale}" for scale in _SCALES)):
        return True
    if family_of(config).is_unread(config, name):
        return True
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")
