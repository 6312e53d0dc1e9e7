"""The scales of an fp8 cache that a checkpoint brings: one for the keys and one for the values of a layer."""

from __future__ import annotations

import math

from bequest.engine.errors import ModelError
from bequest.engine.kernels.kv_format import KvScales
from bequest.engine.models.weights import WeightSource

# Behind a layer's `self_attn.`, as compressed-tensors, ModelOpt and vLLM write them; the first that is there counts.
_KEY_NAMES = ("k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale")
_VALUE_NAMES = ("v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale")


def read_kv_scales(source: WeightSource, prefix: str) -> KvScales:
    """Of the layer whose attention's tensors begin with `prefix`; 1 where the checkpoint says nothing."""
    return KvScales(_read(source, prefix, _KEY_NAMES), _read(source, prefix, _VALUE_NAMES))


def _read(source: WeightSource, prefix: str, endings: tuple[str, ...]) -> float:
    names = source.names()
    name = next((prefix + ending for ending in endings if prefix + ending in names), None)
    if name is None:
        return 1.0
    tensor = source.load(name)
    if tensor.numel() != 1:
        raise ModelError(
            f"{source.description}: {name} has shape {list(tensor.shape)}; an fp8 cache takes one scale per layer"
        )
    scale = float(tensor.float().item())
    if not (math.isfinite(scale) and scale > 0):
        raise ModelError(f"{source.description}: {name} = {scale:g} is no scale of an fp8 cache")
    return scale
