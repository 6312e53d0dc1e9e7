"""The encoder-decoder architectures: how each is described, which tensors it has, what computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.models import t5
from engine.models.encoder_decoder import EncoderDecoder
from engine.models.encoder_decoder_config import EncoderDecoderConfig
from engine.models.fields import Fields
from engine.models.hf_encoder_decoder import parse_t5
from engine.models.layers import Loader
from engine.models.weights import WeightSource, check_shapes


@dataclass(frozen=True, slots=True)
class Family:
    parse: Callable[[Fields, str], Any]  # config.json and the architecture → a config of its own kind
    expected_tensors: Callable[[Any], dict[str, tuple[int, ...]]]
    model: Callable[[Any, Loader], EncoderDecoder]
    output: str  # the output matrix, which a tied checkpoint need not have
    copies: frozenset[str] = frozenset()  # tensors that some checkpoints hold a second time

    def check(self, source: WeightSource, config: EncoderDecoderConfig) -> EncoderDecoderConfig:
        """Refuses a checkpoint as weights.check_tensors does. The config with the tie that the checkpoint has: an
        output matrix of its own counts, whatever config.json says."""
        config = replace(config, tie_word_embeddings=self.output not in source.names())
        names = [name for name in source.names() if name not in self.copies]
        check_shapes(source, names, self.expected_tensors(config), config.architecture)
        return config


_T5 = Family(
    parse_t5,
    t5.expected_tensors,
    t5.T5,
    output="lm_head.weight",
    copies=frozenset({"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"})
    # Old files hold a bias for cross attention, which nobody ever added.
    | {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"},
)

FAMILIES: Mapping[str, Family] = {
    "T5ForConditionalGeneration": _T5,
}


def find_family(architectures: object) -> tuple[str, Family] | None:
    """The first encoder-decoder architecture of config.json's list."""
    names = architectures if isinstance(architectures, list) else []
    return next(((name, FAMILIES[name]) for name in names if name in FAMILIES), None)
