"""The tensors of a PEFT directory by the modules that they belong to."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bequest.engine.adapters.config import FILE, LoraConfig, read_config
from bequest.engine.errors import InvalidAdapter, ModelError
from bequest.engine.formats.git_lfs import refuse_pointers

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FLOATS = ("F32", "F16", "BF16")


_EXPERTS = re.compile(r"\.experts\.(\d|lora_|base_layer)")
_WRAPPED = ".base_layer"
# Of a module that holds all experts of a layer, in the order in which PEFT wraps them: the last one is outermost.
_OF_EXPERTS = ("gate_up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Module:
    """What an adapter adds to a linear module: scale · B A. Of a parameter [E, …] of all experts: of each of them."""

    name: str  # in the model, as transformers calls it
    a: Tensor  # [R, K] float32; of experts [E R, K], expert by expert
    b: Tensor  # [N, R] float32; of experts [N, R E], rank by rank
    scale: float
    stored: str  # the name of its tensors, but for the ending: for errors
    num_experts: int = 0  # E; 0: it is no parameter of experts

    @property
    def rank(self) -> int:
        return self.a.shape[0] // max(1, self.num_experts)

    def of_expert(self, number: int) -> Module:
        a = self.a.view(self.num_experts, self.rank, -1)[number]
        b = self.b.view(len(self.b), self.rank, self.num_experts)[:, :, number]
        return Module(f"{self.name}.{number}", a, b, self.scale, self.stored)


@dataclass(frozen=True, slots=True)
class PeftFiles:
    """An adapter that has been read; whether it fits a model is not known yet."""

    modules: tuple[Module, ...]
    digest: str  # of the two files

    @property
    def rank(self) -> int:
        """The largest."""
        return max(module.rank for module in self.modules)


def read_directory(directory: Path, max_rank: int) -> PeftFiles:
    """Reads the files: not for the event loop. Raises InvalidAdapter, whose text has no path."""
    try:
        return _read(directory, max_rank)
    except OSError as error:
        raise InvalidAdapter(f"The directory cannot be read: {error.strerror}.") from None


def has_experts(directory: Path) -> bool:
    """Whether tensors of the adapter are of experts; False, too, of a directory that cannot be read."""
    try:
        file: Any = safe_open(directory / WEIGHTS, framework="pt")
    except (SafetensorError, OSError):
        return False
    return any(map(_EXPERTS.search, file.keys()))


def _read(directory: Path, max_rank: int) -> PeftFiles:
    if not directory.is_dir():
        raise InvalidAdapter(f"There is no such directory, or it is a file: an adapter is one with {FILE} in it.")
    try:
        refuse_pointers(directory)
    except ModelError:
        raise InvalidAdapter(
            "Its files are Git LFS pointers: fetch the files themselves with `git lfs pull`."
        ) from None
    config = read_config(directory)
    modules = _modules(directory / WEIGHTS, config)
    if (most := max(module.rank for module in modules)) > max_rank:
        message = f"Its rank is {most}, but {max_rank} is the largest that is taken."
        raise InvalidAdapter(message, reason="rank_too_large", rank=most, most=max_rank)
    return PeftFiles(tuple(modules), _digest(directory))


def _modules(path: Path, config: LoraConfig) -> list[Module]:
    if not path.exists():
        others = " Pickled weights (adapter_model.bin) are not read: save the adapter as safetensors."
        raise InvalidAdapter(f"{WEIGHTS} is missing.{others if path.with_suffix('.bin').exists() else ''}")
    try:
        file: Any = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InvalidAdapter(f"{WEIGHTS} is not a safetensors file, or is cut short: {error}.") from None
    names = sorted(file.keys())
    pairs: dict[str, set[str]] = {}
    for name in names:
        stored, _, kind = name.partition(".lora_")
        if kind not in ("A.weight", "B.weight"):
            raise InvalidAdapter(f"{WEIGHTS}: {name} is not the A or B of a linear module; {_advice(name)}.")
        if file.get_slice(name).get_dtype() not in _FLOATS:
            raise InvalidAdapter(f"{WEIGHTS}: {name} is {file.get_slice(name).get_dtype()}, which is not supported.")
        pairs.setdefault(stored, set()).add(kind)
    if not pairs:
        raise InvalidAdapter(f"{WEIGHTS} holds no tensors.")
    return [_module(file, stored, kinds, config) for stored, kinds in pairs.items()]


def _advice(name: str) -> str:
    if "lora_magnitude" in name:
        return "DoRA is not supported"
    if "lora_embedding" in name:
        return "adapters of embeddings are not supported"
    return "only plain LoRA is supported, without biases and whole modules"


def _module(file: Any, stored: str, kinds: set[str], config: LoraConfig) -> Module:
    if len(kinds) == 1:
        lacks = "B" if "A.weight" in kinds else "A"
        raise InvalidAdapter(f"{WEIGHTS}: {stored}.lora_{lacks}.weight is missing.")
    # Copies: the file is mapped, and may be replaced under a running server.
    a, b = (file.get_tensor(f"{stored}.lora_{kind}.weight").to(torch.float32, copy=True) for kind in "AB")
    name = stored.removeprefix(_PREFIX)
    if (parameter := _parameter_of(name, config)) is not None:
        return _of_parameter(parameter, a, b, stored, config)
    if not config.has(name):
        raise InvalidAdapter(f"{WEIGHTS}: {stored}.lora_A.weight is of no module that {FILE} targets.")
    rank = config.rank_of(name)
    for kind, matrix, axis in (("A", a, 0), ("B", b, 1)):
        if matrix.dim() != 2 or matrix.shape[axis] != rank:
            shape = list(matrix.shape)
            raise InvalidAdapter(f"{WEIGHTS}: {stored}.lora_{kind}.weight has shape {shape}, whose rank is not {rank}.")
    return Module(name, a, b, config.scale_of(name), stored)


def _parameter_of(stored: str, config: LoraConfig) -> str | None:
    """The parameter that tensors are of. PEFT wraps a module once for each of its parameters, and names tensors by
    the wrapper: those of the first parameter are the innermost. None: they are of a module."""
    module, depth = stored, 0
    while module.endswith(_WRAPPED):
        module, depth = module.removesuffix(_WRAPPED), depth + 1
    names = _OF_EXPERTS if module.endswith(".experts") else ("weight",)
    targeted = [name for name in (f"{module}.{own}" for own in names) if config.has_parameter(name)]
    return targeted[-1 - depth] if depth < len(targeted) else None


def _of_parameter(name: str, a: Tensor, b: Tensor, stored: str, config: LoraConfig) -> Module:
    rank, scale = config.rank_of(name), config.scale_of(name)
    count = a.shape[0]
    if a.dim() != 2 or b.dim() != 2 or count % rank or b.shape[1] != count:
        shapes = f"{list(a.shape)} and {list(b.shape)}"
        raise InvalidAdapter(
            f"{WEIGHTS}: {stored}.lora_A.weight and lora_B.weight have shapes {shapes}, which are not of rank {rank} "
            f"for each expert of {name}."
        )
    if name.endswith(".weight"):  # a matrix is a module's, whoever names it
        return Module(name.removesuffix(".weight"), a, b, scale, stored)
    return Module(name, a, b, scale, stored, count // rank)


def _digest(directory: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in (FILE, WEIGHTS):
        with (directory / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
