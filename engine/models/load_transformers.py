"""Loads a model that transformers computes. The library is imported here and nowhere before."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from bequest.engine.layers.backend import Backend
from bequest.engine.models.dtype import cpu_has_bfloat16, resolve_cuda_dtype, resolve_dtype, resolve_kv_dtype
from bequest.engine.models.fields import Fields
from bequest.engine.models.generation import hf_generation_defaults
from bequest.engine.models.impl import Implementation
from bequest.engine.models.loaded import LoadedModel
from bequest.engine.models.look import check_length
from bequest.engine.models.safetensors_loader import SafetensorsSource
from bequest.engine.models.transformers_impl.open import make, open_directory

COST = "about two to three times slower than a family of our own would (docs/models.md)"
log = logging.getLogger("bequest.start")


def load_by_transformers(
    directory: Path,
    values: Mapping[str, object],
    impl: Implementation,
    backend: Backend,
    *,
    dtype: str,
    max_model_len: int | None,
    kv_cache_dtype: str,
    dummy: bool,
) -> LoadedModel:
    """As load_model; `values` are those of config.json. Raises ModelError."""
    opened = open_directory(directory, values, max_model_len=max_model_len, trust_remote_code=impl.trust_remote_code)
    check_length(opened.max_position, max_model_len)
    on_cpu = backend.device.type == "cpu"
    if on_cpu:
        # Activations are in what the weights are in, as transformers has it.
        stored = torch.float32 if dummy else SafetensorsSource(directory).dtype
        storage = resolve_dtype(dtype, stored, cpu_has_bfloat16())
    else:
        storage = resolve_cuda_dtype(dtype)
    kv_dtype = resolve_kv_dtype(kv_cache_dtype, storage, on_cpu)
    made = make(opened, backend, storage, dummy=dummy)
    if impl.name == "auto":
        log.warning(
            "%s is not one of Bequest's own architectures: transformers computes it, %s",
            made.model.config.architecture,
            COST,
        )
    kept_in = str(storage).removeprefix("torch.")
    return LoadedModel(
        model=made.model,
        config=made.model.config,
        generation=hf_generation_defaults(directory, Fields(values, str(directory / "config.json"))),
        dtype=storage,
        formats=(kept_in,),
        notes=made.model.notes,
        kv_dtype=kv_dtype,
        max_model_len=max_model_len or opened.max_position,
        num_parameters=made.num_parameters,
        bytes_by_format={kept_in: made.weight_bytes},
        without_graphs="transformers computes the model",
    )
