"""Tensors of a Hugging Face directory: one safetensors file, or several with an index. Files are mapped, not read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bequest.engine.errors import ModelError
from bequest.engine.layers.codes import Codes
from bequest.engine.models.safetensors_files import find_safetensors

FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class SafetensorsSource:
    """A WeightSource."""

    def __init__(self, directory: Path, codes: Mapping[str, frozenset[str]] = MappingProxyType({})) -> None:
        """`codes`: how names of tensors end that hold codes, not numbers, and the types that these may have."""
        self._directory = directory
        self._codes = codes
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

    def kind(self, name: str) -> str:
        """What its numbers are, as safetensors files call it."""
        return str(self._slices[name].get_dtype())

    def load(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def load_codes(self, name: str) -> Codes | None:
        return None

    def name_in_file(self, name: str) -> str:
        return name

    def _refuse_non_float(self) -> None:
        kinds = {name: part.get_dtype() for name, part in self._slices.items()}
        odd = [
            f"{name} ({kind})" for name, kind in kinds.items() if kind not in FLOAT_TYPES and not self._is_code(name)
        ]
        if odd:
            raise ModelError(f"{self._directory}: only float tensors are supported, not {', '.join(odd[:10])}")

    def _is_code(self, name: str) -> bool:
        return any(name.endswith(ending) and self.kind(name) in kinds for ending, kinds in self._codes.items())
