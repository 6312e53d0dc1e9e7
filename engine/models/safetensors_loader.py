"""Tensors of a Hugging Face directory: one safetensors file, or several with an index. Files are mapped, not read."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bequest.engine.errors import ModelError
from bequest.engine.kernels.cpu_weights import QuantisedRows

FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class SafetensorsSource:
    """A WeightSource."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file_of: dict[str, Any] = {}  # tensor name → open file
        for path in find_safetensors(directory):
            try:
                file: Any = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise ModelError(f"{path} is not a safetensors file, or is cut short: {error}") from error
            self._file_of |= dict.fromkeys(file.keys(), file)
        self._slices = {name: file.get_slice(name) for name, file in self._file_of.items()}
        self._refuse_non_float()

    @property
    def description(self) -> str:
        return str(self._directory)

    @property
    def dtype(self) -> torch.dtype:
        kinds = [part.get_dtype() for part in self._slices.values() if len(part.get_shape()) == 2]
        return FLOAT_TYPES[max(set(kinds), key=kinds.count)] if kinds else torch.float32

    def names(self) -> Collection[str]:
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slices[name].get_shape())

    def load(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def load_codes(self, name: str) -> QuantisedRows | None:
        return None

    def _refuse_non_float(self) -> None:
        kinds = {name: part.get_dtype() for name, part in self._slices.items()}
        if odd := [f"{name} ({kind})" for name, kind in kinds.items() if kind not in FLOAT_TYPES]:
            raise ModelError(f"{self._directory}: only float tensors are supported, not {', '.join(odd[:10])}")


def find_safetensors(directory: Path) -> list[Path]:
    """The weight files, as the index lists them where there is one."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        return _indexed_files(index)
    single = directory / "model.safetensors"
    if single.exists():
        return [single]
    if found := sorted(directory.glob("*.safetensors")):
        return found
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt*")):
        advice = "only pickled weights (.bin, .pt, .pth), which are not supported; convert them to safetensors"
        raise ModelError(f"{directory} holds {advice}")
    raise ModelError(f"{directory} holds no *.safetensors file")


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index} is not an index of safetensors files: {error!r}") from error
    paths = [index.parent / name for name in names]
    if missing := [path.name for path in paths if not path.exists()]:
        raise ModelError(f"{index.parent} lacks {', '.join(missing)}, which its index names")
    return paths
