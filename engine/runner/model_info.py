"""What the server and the scheduler are told of a model that was loaded, and what the device can do with it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from bequest.engine.config import EngineConfig
from bequest.engine.errors import ModelError
from bequest.engine.fetch import served_name
from bequest.engine.kernels.kv_format import FP8
from bequest.engine.models.any_config import ModelConfig
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.embedded import SAMPLING
from bequest.engine.models.encoder_decoder_config import EncoderDecoderConfig
from bequest.engine.models.generation import check_sampling
from bequest.engine.models.loaded import LoadedModel
from bequest.engine.runner.encoder_info import encoder_info
from bequest.engine.runner.memory import CachePlan
from bequest.engine.types import ModelInfo
from bequest.engine.types.model import Numbers
from bequest.engine.types.speculation import ON_CPU, DraftCosts, ModelDrafts

log = logging.getLogger("bequest.start")

_FILES: Mapping[str, Literal["gguf", "pt"]] = {".gguf": "gguf", ".pt": "pt"}


def drafts_on_cpu(config: ModelConfig, model: ModelDrafts | None) -> DraftCosts | None:
    return replace(ON_CPU, model=model) if _may_draft(config) else None


def _may_draft(config: ModelConfig) -> bool:
    """Where a row's bits depend on the rows beside it, as transformers computes them, drafts would change answers."""
    return isinstance(config, EncoderDecoderConfig | DecoderConfig)


def drafts_on_gpu(config: ModelConfig, costs: DraftCosts) -> DraftCosts | None:
    return costs if _may_draft(config) else None


def model_info(
    config: EngineConfig,
    path: Path,
    loaded: LoadedModel,
    plan: CachePlan,
    states_dtype: torch.dtype,
    drafts: DraftCosts | None,
) -> ModelInfo:
    return ModelInfo(
        name=served_name(config.model, path),
        architecture=loaded.architecture,
        max_model_len=plan.max_model_len,
        vocab_size=loaded.config.vocab_size,
        # Files name ends that their model cannot say: tokens of another tokenizer.
        eos_token_ids=tuple(t for t in loaded.generation.eos_token_ids if t < loaded.config.vocab_size),
        dtype=dtype_name(loaded.dtype),
        num_parameters=loaded.num_parameters,
        default_sampling=default_sampling(config, loaded),
        num_layers=loaded.config.num_layers,
        hidden_size=loaded.config.hidden_size,
        states_dtype="float32" if states_dtype is torch.float32 else "bfloat16",
        encoder=encoder_info(config, loaded),
        numbers=_numbers(path, loaded),
        drafts=drafts,
        vision=None if loaded.sight is None else loaded.sight.info,
    )


def _numbers(path: Path, loaded: LoadedModel) -> Numbers:
    parts = 1 if loaded.cutting is None else loaded.cutting.size
    return Numbers(
        kv_cache_dtype=dtype_name(loaded.kv_dtype),
        cpu_matmul=loaded.matmul,
        weight_bytes={name: parts * count for name, count in loaded.bytes_by_format.items()},
        weight_files=_FILES.get(path.suffix, "safetensors"),
    )


def check_embeds(config: EngineConfig, loaded: LoadedModel) -> None:
    """Raises ModelError where prompts of the model can be nothing but tokens."""
    if config.allow_prompt_embeds and not isinstance(loaded.config, DecoderConfig):
        whose = "has an encoder" if isinstance(loaded.config, EncoderDecoderConfig) else "is computed by transformers"
        raise ModelError(f"allow_prompt_embeds= cannot be used: {loaded.architecture} {whose}, its prompts are tokens")
    looks_up = isinstance(loaded.config, DecoderConfig) and loaded.config.looks_tokens_up
    if config.allow_prompt_embeds and looks_up:
        told = "its layers look tokens up, too (hidden_size_per_layer_input)"
        raise ModelError(f"allow_prompt_embeds= cannot be used: {loaded.architecture}: {told}")


def default_sampling(config: EngineConfig, loaded: LoadedModel) -> dict[str, float | int]:
    """How requests are sampled that do not say it."""
    if config.generation_config == "none":
        return {}
    if loaded.generation.not_followed:
        log.warning("generation_config.json: not followed: %s", ", ".join(loaded.generation.not_followed))
    own = loaded.generation.sampling or (SAMPLING if config.model is None else {})
    check_sampling(own)
    if own:
        log.info("sampling, unless a request says otherwise: %s", ", ".join(f"{k} {v:g}" for k, v in own.items()))
    return dict(own)


def dtype_name(dtype: torch.dtype) -> str:
    return "fp8_e4m3" if dtype is FP8 else str(dtype).removeprefix("torch.")
