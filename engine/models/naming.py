"""Checkpoints by the names that families have for their tensors: what other names and orders become."""

from __future__ import annotations

from bequest.engine.models.any_config import OwnConfig
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.encoder_decoder_config import EncoderDecoderConfig
from bequest.engine.models.expert_names import ExpertNames
from bequest.engine.models.families.table import FAMILIES
from bequest.engine.models.gpt_oss_names import GptOssNames
from bequest.engine.models.registry import HF_ARCHITECTURES
from bequest.engine.models.respelled import respelled, respelled_gguf
from bequest.engine.models.text_part import with_prefix
from bequest.engine.models.weights import WeightSource

_TURNED_GGUF = frozenset({"gpt-oss"})


def as_families_name(source: WeightSource, config: OwnConfig) -> WeightSource:
    """Tensors that transformers names, such as those of a checkpoint of its own, or of an adapter. Some may be
    missing."""
    if isinstance(config, EncoderDecoderConfig):
        return FAMILIES[config.architecture].named(source)
    if config.architecture not in HF_ARCHITECTURES:  # of a GGUF file
        return respelled_gguf(source, config)
    return respelled(_with_experts(with_prefix(source), config), config)


def _with_experts(source: WeightSource, config: DecoderConfig) -> WeightSource:
    implied = HF_ARCHITECTURES[config.architecture].experts
    if config.experts is None or implied is None:
        return source
    if implied.interleaved:
        return GptOssNames(source)
    sizes = (config.hidden_size, config.experts.intermediate_size)
    return ExpertNames(source, sizes, config.num_layers if implied.drafts else None)


def named_by_families(source: WeightSource, config: OwnConfig) -> WeightSource:
    """The same of an adapter, whose tensors are named by transformers even where the model's are not."""
    if not isinstance(config, DecoderConfig) or config.experts is None or config.architecture in HF_ARCHITECTURES:
        return as_families_name(source, config)
    # Of a GGUF file.
    sizes = (config.hidden_size, config.experts.intermediate_size)
    named = GptOssNames(source) if has_turned_experts(config) else ExpertNames(source, sizes)
    return as_families_name(named, config)


def has_turned_experts(config: OwnConfig) -> bool:
    """Whether transformers keeps matrices of experts [K, N], with rows of gates and of ups in turns."""
    if not isinstance(config, DecoderConfig) or config.experts is None:
        return False
    if config.architecture not in HF_ARCHITECTURES:
        return config.architecture in _TURNED_GGUF
    implied = HF_ARCHITECTURES[config.architecture].experts
    return implied is not None and implied.interleaved
