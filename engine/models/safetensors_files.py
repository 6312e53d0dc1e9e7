"""Which files of a directory hold its weights. No torch here."""

from __future__ import annotations

import json
from pathlib import Path

from bequest.engine.errors import ModelError


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
