"""A model of the transformers library from a checkpoint's directory: which class it is, and its weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from sys import modules
from typing import Any

import torch

from bequest.engine.errors import ModelError
from bequest.engine.models.transformers_impl.described import needs_trust, refusal, remote_code
from bequest.engine.models.transformers_impl.library_model import LibraryModel
from bequest.engine.models.weights import MOST_NAMED

log = logging.getLogger("bequest.start")

# Rotations whose frequencies depend on the longest sequence of a batch, beyond a length.
_BATCH_ROTATIONS = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class Found:
    """A class of the library and its config: the model is not made yet."""

    model_class: type[Any]
    config: Any

    @property
    def name(self) -> str:
        return self.model_class.__name__


def find_class(directory: Path, values: Mapping[str, object], *, trust_remote_code: bool) -> Found:
    """The class of a checkpoint's model. Raises ModelError."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    source = str(directory / "config.json")
    is_native = values.get("model_type") in CONFIG_MAPPING
    if not is_native and not remote_code(values):
        raise refusal(source, f"this version of the library has no model_type {values.get('model_type')!r}")
    if not is_native and not trust_remote_code:
        raise needs_trust(source)
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=not is_native)
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ModelError(f"{source}: transformers cannot read it: {error}") from error
    found: Any
    if is_native:
        found = AutoModelForCausalLM._model_mapping.get(type(config), None)
    else:
        log.warning("running Python code of the model itself, from %s", directory)
        found = _remote_class(values, directory)
    _check_class(found, values, source)
    return Found(found, config)


def _remote_class(values: Mapping[str, object], directory: Path) -> type[Any]:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    named = values["auto_map"]
    assert isinstance(named, Mapping)
    found: type[Any] = get_class_from_dynamic_module(named["AutoModelForCausalLM"], directory, local_files_only=True)
    return found


def _check_class(found: type[Any] | None, values: Mapping[str, object], source: str) -> None:
    named = values.get("architectures")
    names = [str(name) for name in named] if isinstance(named, list) else []
    if found is None:
        raise refusal(source, f"the library has no causal language model of model_type {values.get('model_type')!r}")
    if found.__name__ not in names:
        named = ", ".join(names) or "(no architecture)"
        raise refusal(source, f"{named} is not a causal language model; of this model_type that is {found.__name__}")
    if getattr(found, "_is_stateful", False):
        raise refusal(source, f"{found.__name__} has recurrent layers, whose state is not kept per token")
    by_interface = found._supports_attention_backend or hasattr(modules[found.__module__], "ALL_ATTENTION_FUNCTIONS")
    if not by_interface:
        raise refusal(source, f"the attention of {found.__name__} does not go through transformers' interface")


def longest(found: Found, max_model_len: int | None, source: str) -> int:
    """Positions that sequences may have: the model's own, fewer where its rotation would depend on the batch."""
    text = found.config.get_text_config(decoder=True)
    own = getattr(text, "max_position_embeddings", None)
    if not isinstance(own, int):
        if max_model_len is None:
            raise ModelError(f"{source} says no context length (max_position_embeddings); set max_model_len=")
        own = max_model_len
    for rope in _rotations(text):
        if rope.get("rope_type", rope.get("type")) in _BATCH_ROTATIONS:
            own = min(own, int(rope.get("original_max_position_embeddings") or own))
    return own


def _rotations(config: Any) -> list[Mapping[str, Any]]:
    """One for all layers, or one for each kind of them."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(rope, Mapping):
        return []
    nested = [part for part in rope.values() if isinstance(part, Mapping)]
    return nested or [rope]


def read_weights(found: Found, directory: Path, dtype: torch.dtype) -> LibraryModel:
    """The model in host memory, all of its weights from the files."""
    with quiet():
        try:
            model, info = found.model_class.from_pretrained(
                directory,
                config=found.config,
                dtype=dtype,
                attn_implementation="eager",
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise ModelError(f"{directory}: transformers cannot load the weights: {error}") from error
    faults = [f"{name} is missing" for name in sorted(info["missing_keys"])]
    faults += [f"{name} is not a tensor of this architecture" for name in sorted(info["unexpected_keys"])]
    faults += [f"{entry[0]} has another shape" for entry in sorted(info["mismatched_keys"])]
    if faults:
        more = [f"and {len(faults) - MOST_NAMED} more"] if len(faults) > MOST_NAMED else []
        listed = "; ".join([*faults[:MOST_NAMED], *more])
        raise ModelError(f"{directory} does not fit {found.name} as configured: {listed}")
    return LibraryModel(model)


def random_weights(found: Found, dtype: torch.dtype) -> LibraryModel:
    """The same with the weights that it begins its training with."""
    with quiet():
        model = found.model_class._from_config(found.config, dtype=dtype, attn_implementation="eager")
    return LibraryModel(model.eval())


@contextmanager
def quiet() -> Iterator[None]:
    """Without bars and advice of the library, which has its own settings for them."""
    from transformers.utils import logging as library

    level, bars = library.get_verbosity(), library.is_progress_bar_enabled()
    library.set_verbosity_error()
    library.disable_progress_bar()
    try:
        yield
    finally:
        library.set_verbosity(level)
        if bars:
            library.enable_progress_bar()
