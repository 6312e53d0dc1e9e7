"""From a directory to a model that transformers computes over our cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from bequest.engine.layers.backend import Backend
from bequest.engine.models.transformers_impl import trial
from bequest.engine.models.transformers_impl.described import check_described, refusal
from bequest.engine.models.transformers_impl.library import Found, find_class, longest, random_weights, read_weights
from bequest.engine.models.transformers_impl.library_model import LibraryModel
from bequest.engine.models.transformers_impl.model import TransformersDecoder
from bequest.engine.models.transformers_impl.shape import TransformersConfig
from bequest.engine.models.transformers_impl.watched import Call, Watched, failures_told, watch
from bequest.engine.types.hidden import MOST_LAYERS


@dataclass(frozen=True, slots=True)
class Opened:
    """The model is not made yet."""

    directory: Path
    found: Found
    max_position: int

    @property
    def source(self) -> str:
        return str(self.directory / "config.json")


@dataclass(frozen=True, slots=True)
class Made:
    model: TransformersDecoder
    num_parameters: int
    weight_bytes: int


def open_directory(
    directory: Path, values: Mapping[str, object], *, max_model_len: int | None, trust_remote_code: bool
) -> Opened:
    """`values` are those of config.json. Raises ModelError for what cannot run this way."""
    source = str(directory / "config.json")
    check_described(values, source, trust_remote_code=trust_remote_code)
    found = find_class(directory, values, trust_remote_code=trust_remote_code)
    return Opened(directory, found, longest(found, max_model_len, source))


def make(opened: Opened, backend: Backend, dtype: torch.dtype, *, dummy: bool) -> Made:
    """Reads the weights, watches the model, and tries it. Raises ModelError."""
    found = opened.found
    model = random_weights(found, dtype) if dummy else read_weights(found, opened.directory, dtype)
    model.move_to(backend.device)
    num_parameters, num_bytes = model.num_parameters, model.num_bytes
    watched = watch(model, opened.source, opened.max_position)
    shape = _shape(opened, model, watched, backend.head_sizes(dtype))
    with failures_told(opened.source):
        expected = trial.by_the_library(model, shape)
    computed = torch.float32 if backend.device.type == "cpu" else dtype
    decoder = TransformersDecoder(model, watched, shape, computed, backend.ops)
    trial.compare(decoder, expected, dtype, opened.source)
    return Made(decoder, num_parameters, num_bytes)


def _shape(opened: Opened, model: LibraryModel, watched: Watched, head_sizes: tuple[int, ...]) -> TransformersConfig:
    first = watched.calls[0]
    _check_calls(watched, opened.source)
    return TransformersConfig(
        architecture=opened.found.name,
        hidden_size=watched.hidden_size,
        num_layers=len(watched.layers),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=_cached_dim(watched, head_sizes, opened.source),
        vocab_size=model.num_outputs,
        max_position=opened.max_position,
        sliding_windows=tuple(call.window for call in watched.calls),
    )


def _check_calls(watched: Watched, source: str) -> None:
    """That one cache fits all attentions."""
    if len(watched.layers) >= MOST_LAYERS:
        raise refusal(source, f"it has {len(watched.layers)} layers, {MOST_LAYERS - 1} are the most")
    if len({_heads(call) for call in watched.calls}) > 1:
        raise refusal(source, "its layers have different numbers of heads")
    num_heads, num_kv_heads = _heads(watched.calls[0])
    if num_heads % num_kv_heads:
        raise refusal(source, f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly")


def _heads(call: Call) -> tuple[int, int]:
    return call.num_heads, call.num_kv_heads


def _cached_dim(watched: Watched, sizes: tuple[int, ...], source: str) -> int:
    """Heads of keys and values lie in rows of one size, with zeros behind them where they are smaller."""
    needed = max(max(call.key_dim, call.value_dim) for call in watched.calls)
    if not sizes:
        return needed
    fitting = [size for size in sizes if size >= needed]
    if not fitting:
        raise refusal(source, f"heads of {needed} are too large, {max(sizes)} is the most here")
    return min(fitting)
