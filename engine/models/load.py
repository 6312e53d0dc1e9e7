"""Opens a checkpoint, whatever its format, and makes a model of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.errors import ModelError
from engine.models.backend import Backend, CpuBackend
from engine.models.config import DecoderConfig
from engine.models.decoder import Decoder
from engine.models.dtype import cpu_has_bfloat16, resolve_cuda_dtype, resolve_dtype
from engine.models.dummy import DummySource
from engine.models.fields import Fields
from engine.models.generation import (
    GenerationDefaults,
    gguf_generation_defaults,
    hf_generation_defaults,
    read_json,
)
from engine.models.hf_config import parse_hf_config
from engine.models.layers import Loader
from engine.models.padding import pad_heads
from engine.models.safetensors_loader import SafetensorsSource
from engine.models.weights import WeightSource, check_tensors, expected_tensors


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint, its weights still in the files."""

    config: DecoderConfig
    source: WeightSource
    generation: GenerationDefaults


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Decoder
    config: DecoderConfig
    generation: GenerationDefaults
    dtype: torch.dtype  # of the stored weights
    max_model_len: int
    num_parameters: int
    weight_bytes: int


def load_model(
    path: Path,
    dtype: str = "auto",
    max_model_len: int | None = None,
    *,
    backend: Backend | None = None,
    dummy: bool = False,
) -> LoadedModel:
    """A Hugging Face directory or a .gguf file. `dtype` is auto, float32 or bfloat16; `max_model_len` may shorten the
    model's own context; the backend is the CPU's unless given; `dummy` takes random weights for those of the files.
    Shows a progress bar on a terminal. Raises ModelError."""
    backend = backend or CpuBackend()
    checkpoint = open_dummy(path, backend.device) if dummy else open_checkpoint(path)
    config, source = checkpoint.config, checkpoint.source
    length = _resolve_length(config, max_model_len)
    on_cpu = backend.device.type == "cpu"
    storage = resolve_dtype(dtype, source.dtype, cpu_has_bfloat16()) if on_cpu else resolve_cuda_dtype(dtype)
    num_parameters = sum(math.prod(shape) for shape in expected_tensors(config).values())
    if sizes := backend.head_sizes(storage):
        config, source = pad_heads(config, source, sizes)
    model = Decoder(config, Loader(source, backend, storage), length)
    return LoadedModel(
        model=model,
        config=config,
        generation=checkpoint.generation,
        dtype=storage,
        max_model_len=length,
        num_parameters=num_parameters,
        weight_bytes=model.weight_bytes,
    )


def open_checkpoint(path: Path) -> Checkpoint:
    """Reads the description and checks that every tensor is there."""
    if not path.exists():
        raise ModelError(f"{path}: no such file or directory; a model is a Hugging Face directory or a .gguf file")
    checkpoint = _open_directory(path) if path.is_dir() else _open_gguf(path)
    check_tensors(checkpoint.source, checkpoint.config)
    return checkpoint


def open_dummy(directory: Path, device: torch.device) -> Checkpoint:
    """The model that config.json describes, with random weights made on the device: for measuring."""
    values = read_json(directory / "config.json")
    config = parse_hf_config(values, str(directory / "config.json"))
    generation = hf_generation_defaults(directory, Fields(values, str(directory)))
    return Checkpoint(config, DummySource(expected_tensors(config), device), generation)


def _open_directory(directory: Path) -> Checkpoint:
    path = directory / "config.json"
    if not path.exists():
        files = [file.name for file in sorted(directory.glob("*.gguf"))]
        hint = f"; name the file itself: {', '.join(files)}" if files else ""
        raise ModelError(f"{directory} holds no config.json, so it is not a Hugging Face model{hint}")
    values = read_json(path)
    config = parse_hf_config(values, str(path))
    generation = hf_generation_defaults(directory, Fields(values, str(path)))
    return Checkpoint(config, SafetensorsSource(directory), generation)


def _open_gguf(path: Path) -> Checkpoint:
    from engine.models.gguf_config import parse_gguf_config  # slow to import, and a directory needs none of it
    from engine.models.gguf_file import GGUFFile
    from engine.models.gguf_loader import GGUFSource

    file = GGUFFile(path)
    config = parse_gguf_config(file)
    return Checkpoint(config, GGUFSource(file, config), gguf_generation_defaults(file))


def _resolve_length(config: DecoderConfig, max_model_len: int | None) -> int:
    if max_model_len is not None and max_model_len > config.max_position:
        raise ModelError(f"max_model_len {max_model_len} is more than the model's own {config.max_position} positions")
    return max_model_len or config.max_position
