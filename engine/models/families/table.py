"""The encoder-decoder architectures: how each is described, which tensors it has, what computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from bequest.engine.errors import ModelError
from bequest.engine.models.encoder_decoder import EncoderDecoderParts
from bequest.engine.models.encoder_decoder_config import BartConfig, EncoderDecoderConfig, T5Config, WhisperConfig
from bequest.engine.models.families import bart, t5, whisper
from bequest.engine.models.fields import Fields
from bequest.engine.models.hf_encoder_decoder import parse_bart, parse_t5, parse_whisper
from bequest.engine.models.reader import Lister, Reader, Shape
from bequest.engine.models.weights import PrefixedSource, WeightSource, check_shapes

Config = TypeVar("Config", bound=EncoderDecoderConfig)


@dataclass(frozen=True, slots=True)
class Family:
    parse: Callable[[Fields, str], EncoderDecoderConfig]  # config.json and the architecture
    describe: Callable[[EncoderDecoderConfig, Reader], EncoderDecoderParts]
    embedding: str
    output: str  # the output matrix, which a tied checkpoint need not have
    overlooked: frozenset[str] = frozenset()  # tensors that a checkpoint may have: copies, leftovers
    prefix: str = ""  # of both stacks, which a checkpoint saved without an output matrix lacks

    def expected_tensors(self, config: EncoderDecoderConfig) -> dict[str, Shape]:
        """Every tensor of the model and its shape."""
        lister = Lister()
        self.describe(config, lister)
        return lister.shapes

    def named(self, source: WeightSource) -> WeightSource:
        """The tensors by the names of a whole model."""
        bare = [name for name in source.names() if name.startswith(_BARE)]
        return PrefixedSource(source, self.prefix, frozenset(bare)) if self.prefix and bare else source

    def check(self, source: WeightSource, config: EncoderDecoderConfig) -> EncoderDecoderConfig:
        """Refuses a checkpoint as weights.check_tensors does. The config with the tie that the checkpoint has: an
        output matrix that differs from the embedding counts, whatever config.json says."""
        tied = self._is_tied(source, config)
        config = replace(config, tie_word_embeddings=tied)
        overlooked = self.overlooked | {self.output} if tied else self.overlooked
        names = [name for name in source.names() if name not in overlooked]
        check_shapes(source, names, self.expected_tensors(config), config.architecture)
        return config

    def _is_tied(self, source: WeightSource, config: EncoderDecoderConfig) -> bool:
        if self.output not in source.names():
            return True
        if not config.tie_word_embeddings or self.embedding not in source.names():
            return False
        return torch.equal(source.load(self.output), source.load(self.embedding))


_BARE = ("shared.", "encoder.", "decoder.")
# What save_pretrained calls a model without its output matrix, where that is tied.
_HEADLESS = {"BartModel": "BartForConditionalGeneration", "MBartModel": "MBartForConditionalGeneration"}


def _of(
    kind: type[Config], describe: Callable[[Config, Reader], EncoderDecoderParts]
) -> Callable[[EncoderDecoderConfig, Reader], EncoderDecoderParts]:
    """A family describes configs of its own kind, which its parser has made."""

    def checked(config: EncoderDecoderConfig, read: Reader) -> EncoderDecoderParts:
        assert isinstance(config, kind), config
        return describe(config, read)

    return checked


def _t5(*, multilingual: bool) -> Family:
    return Family(
        partial(parse_t5, multilingual=multilingual),
        _of(T5Config, t5.describe),
        embedding="shared.weight",
        output="lm_head.weight",
        overlooked=frozenset(
            {
                "encoder.embed_tokens.weight",
                "decoder.embed_tokens.weight",
                # Cross attention has none: old files hold one that nobody ever added.
                "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
            }
        ),
    )


def _bart(*, pre_norm: bool) -> Family:
    copies = {"model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"}
    return Family(
        partial(parse_bart, pre_norm=pre_norm),
        _of(BartConfig, bart.describe),
        embedding="model.shared.weight",
        output="lm_head.weight",
        overlooked=frozenset({*copies, bart.FINAL_BIAS}),
        prefix="model.",
    )


FAMILIES: Mapping[str, Family] = {
    "BartForConditionalGeneration": _bart(pre_norm=False),
    "MBartForConditionalGeneration": _bart(pre_norm=True),
    "T5ForConditionalGeneration": _t5(multilingual=False),
    "MT5ForConditionalGeneration": _t5(multilingual=True),
    "WhisperForConditionalGeneration": Family(
        parse_whisper,
        _of(WhisperConfig, whisper.describe),
        embedding="model.decoder.embed_tokens.weight",
        output="proj_out.weight",
    ),
}


def whole_name(architectures: object) -> object:
    """config.json's list, with the name of the whole model where only its stacks were saved."""
    if not isinstance(architectures, list):
        return architectures
    return [_HEADLESS.get(name, name) if isinstance(name, str) else name for name in architectures]


def find_family(architectures: object) -> tuple[str, Family] | None:
    """The first encoder-decoder architecture of config.json's list. Raises ModelError for one without a decoder."""
    names = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    if alone := next((name for name in names if name.endswith("EncoderModel")), None):
        raise ModelError(
            f"architecture {alone} is an encoder without a decoder, which is not supported; "
            f"supported are whole models: {', '.join(FAMILIES)}"
        )
    return next(((name, FAMILIES[name]) for name in names if name in FAMILIES), None)
