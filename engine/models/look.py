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
from bequest.engine.models.safetensors_files import find_safetensors

if TYPE_CHECKING:
    from bequest.engine.formats.gguf_file import GGUFFile


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen. `config` is None for formats whose description lies among their weights."""

    config: ModelConfig | None
    gguf: GGUFFile | None = None


def look_at(path: Path, *, max_model_len: int | None = None, dummy: bool = False) -> Look:
    """Raises ModelError; `dummy` weights need no files."""
    looked = _look_at(path, dummy)
    if looked.config is not None:
        check_length(looked.config, max_model_len)
    return looked


def check_length(config: ModelConfig, max_model_len: int | None) -> None:
    if max_model_len is not None and max_model_len > config.max_position:
        raise ModelError(f"max_model_len={max_model_len} is more than the model's own {config.max_position} positions")


def _look_at(path: Path, dummy: bool) -> Look:
    if not path.exists():
        raise ModelError(f"{path}: no such file or directory")
    refuse_pointers(path)
    if not dummy and foreign_file(path) is not None:
        return Look(None)
    if path.is_dir() or dummy:
        config = parse_config(read_config(path), str(path / "config.json"))
        if not dummy:
            check_headers(path)
        return Look(config)
    if path.suffix != ".gguf":
        raise ModelError(f"{path}: neither a model directory nor a .gguf or .pt file")
    from bequest.engine.formats.gguf_file import GGUFFile  # slow to import, and a directory needs none of it
    from bequest.engine.models.gguf_config import parse_gguf_config

    file = GGUFFile(path)
    return Look(parse_gguf_config(file), file)


def check_headers(directory: Path) -> None:
    """That the weights' files are there and as long as they say."""
    for path in find_safetensors(directory):
        try:
            with safe_open(path, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not a safetensors file, or is cut short: {error}") from error
