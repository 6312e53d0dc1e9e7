"""The encoder-decoder architectures: which tensors each has, and what computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from bequest.engine.models.encoder_decoder import EncoderDecoderParts
from bequest.engine.models.encoder_decoder_config import BartConfig, EncoderDecoderConfig, T5Config, WhisperConfig
from bequest.engine.models.families import bart, t5, whisper
from bequest.engine.models.reader import Lister, Reader, Shape
from bequest.engine.models.weights import PrefixedSource, WeightSource, check_shapes

Config = TypeVar("Config", bound=EncoderDecoderConfig)


@dataclass(frozen=True, slots=True)
class Family:
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


def _of(
    kind: type[Config], describe: Callable[[Config, Reader], EncoderDecoderParts]
) -> Callable[[EncoderDecoderConfig, Reader], EncoderDecoderParts]:
    """A family describes configs of its own kind, which its parser has made."""

    def checked(config: EncoderDecoderConfig, read: Reader) -> EncoderDecoderParts:
        assert isinstance(config, kind), config
        return describe(config, read)

    return checked


def _t5() -> Family:
    return Family(
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


def _bart() -> Family:
    copies = {"model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"}
    return Family(
        _of(BartConfig, bart.describe),
        embedding="model.shared.weight",
        output="lm_head.weight",
        overlooked=frozenset({*copies, bart.FINAL_BIAS}),
        prefix="model.",
    )


FAMILIES: Mapping[str, Family] = {
    "BartForConditionalGeneration": _bart(),
    "MBartForConditionalGeneration": _bart(),
    "T5ForConditionalGeneration": _t5(),
    "MT5ForConditionalGeneration": _t5(),
    "WhisperForConditionalGeneration": Family(
        _of(WhisperConfig, whisper.describe),
        embedding="model.decoder.embed_tokens.weight",
        output="proj_out.weight",
    ),
}
