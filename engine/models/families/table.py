"""The encoder-decoder architectures: which tensors each has, and what computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from bequest.engine.models.encoder_decoder import EncoderDecoderParts
from bequest.engine.models.encoder_decoder_config import BartConfig, EncoderDecoderConfig, T5Config, WhisperConfig
from bequest.engine.models.families import bart, t5, whisper
from bequest.engine.models.families.embeddings import STACKS
from bequest.engine.models.reader import Lister, Reader, Shape
from bequest.engine.models.text_part import RenamedSource
from bequest.engine.models.weights import PrefixedSource, WeightSource, check_shapes

Config = TypeVar("Config", bound=EncoderDecoderConfig)


@dataclass(frozen=True, slots=True)
class Family:
    describe: Callable[[EncoderDecoderConfig, Reader], EncoderDecoderParts]
    embedding: str
    output: str  # the output matrix, which a tied checkpoint need not have
    # By stack: what a checkpoint may have beside the embedding, mostly copies of it.
    tables: Mapping[str, str] = field(default_factory=dict)
    overlooked: frozenset[str] = frozenset()  # leftovers that a checkpoint may have
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

    def whole(self, source: WeightSource, config: EncoderDecoderConfig) -> WeightSource:
        """With the embedding under its own name, where a checkpoint has it under that of a copy alone: tools that
        write each tensor once keep the first of its names."""
        names = source.names()
        copies = [*self.tables.values(), *([self.output] if config.tie_word_embeddings else [])]
        found = [name for name in copies if name in names]
        if self.embedding in names or not found:
            return source
        return RenamedSource(source, {name: name for name in names} | {self.embedding: found[0]})

    def check(self, source: WeightSource, config: EncoderDecoderConfig) -> EncoderDecoderConfig:
        """Refuses a checkpoint as weights.check_tensors does. The config with the ties that the checkpoint has: an
        output matrix, or a table of a stack, that differs from the embedding counts, whatever config.json says."""
        stored = self.output in source.names()
        tied = config.tie_word_embeddings and (not stored or self._is_copy(source, self.output))
        own = [stack for stack, name in self.tables.items() if name in source.names()]
        own = [stack for stack in own if not self._is_copy(source, self.tables[stack])]
        config = replace(config, tie_word_embeddings=tied, own_tables=frozenset(own))
        expected = self.expected_tensors(config)
        overlooked = {*self.overlooked, *self.tables.values(), self.embedding} | ({self.output} if tied else set())
        names = [name for name in source.names() if name in expected or name not in overlooked]
        check_shapes(source, names, expected, config.architecture)
        return config

    def _is_copy(self, source: WeightSource, name: str) -> bool:
        """Whether a tensor is the embedding once more."""
        if self.embedding not in source.names():
            return False
        return torch.equal(source.load(name), source.load(self.embedding))


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
        tables={stack: f"{stack}.embed_tokens.weight" for stack in STACKS},
        # Cross attention has none: old files hold one that nobody ever added.
        overlooked=frozenset({"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"}),
    )


def _bart() -> Family:
    return Family(
        _of(BartConfig, bart.describe),
        embedding="model.shared.weight",
        output="lm_head.weight",
        tables={stack: f"model.{stack}.embed_tokens.weight" for stack in STACKS},
        overlooked=frozenset({bart.FINAL_BIAS}),
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
