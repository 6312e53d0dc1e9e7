"""A first look at a model's files: what is wrong with them is said within a moment, before anybody waits for torch.

No torch here, and no weights are read; of the files that hold them, only the headers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from bequest.engine.errors import ModelError
from bequest.engine.formats.git_lfs import refuse_pointers
from bequest.engine.models.any_config import ModelConfig, parse_config, read_config
from bequest.engine.models.foreign import foreign_file
from bequest.engine.models.impl import AUTO, Implementation
from bequest.engine.models.safetensors_files import find_safetensors
from bequest.engine.models.transformers_impl.described import check_described

if TYPE_CHECKING:
    from bequest.engine.formats.gguf_file import GGUFFile


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen. `config` is None for formats whose description lies among their weights, and for models that only
    transformers can describe."""

    config: ModelConfig | None
    gguf: GGUFFile | None = None


def look_at(path: Path, *, max_model_len: int | None = None, dummy: bool = False, impl: Implementation = AUTO) -> Look:
    """Raises ModelError; `dummy` weights need no files."""
    looked = _look_at(path, dummy, impl)
    if looked.config is not None:
        check_length(looked.config.max_position, max_model_len)
    return looked


def check_length(max_position: int, max_model_len: int | None) -> None:
    if max_model_len is not None and max_model_len > max_position:
        raise ModelError(f"max_model_len={max_model_len} is more than the model's own {max_position} positions")


def _look_at(path: Path, dummy: bool, impl: Implementation) -> Look:
    if not path.exists():
        raise ModelError(f"{path}: no such file or directory")
    refuse_pointers(path)
    check_format(path, impl)
    if not dummy and foreign_file(path) is not None:
        return Look(None)
    if path.is_dir() or dummy:
        config = look_at_config(path, impl)
        if not dummy:
            check_headers(path)
        return Look(config)
    if path.suffix != ".gguf":
        raise ModelError(f"{path}: neither a model directory nor a .gguf or .pt file")
    from bequest.engine.formats.gguf_file import GGUFFile  # slow to import, and a directory needs none of it
    from bequest.engine.models.gguf_config import parse_gguf_config

    file = GGUFFile(path)
    return Look(parse_gguf_config(file), file)


def check_format(path: Path, impl: Implementation) -> None:
    if impl.name == "transformers" and (path.is_file() or foreign_file(path) is not None):
        raise ModelError(f"{path}: model_impl=transformers takes directories of config.json and safetensors alone")


def look_at_config(directory: Path, impl: Implementation) -> ModelConfig | None:
    """None: transformers will describe the model."""
    values, source = read_config(directory), str(directory / "config.json")
    if not impl.is_transformers(values):
        return parse_config(values, source)
    check_described(values, source, trust_remote_code=impl.trust_remote_code)
    return None


def check_headers(directory: Path) -> None:
    """That the weights' files are there and as long as they say."""
    for path in find_safetensors(directory):
        try:
            with safe_open(path, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not a safetensors file, or is cut short: {error}") from error
