"""Git LFS pointers: what a clone without Git LFS holds in place of large files."""

from __future__ import annotations

from pathlib import Path

from bequest.engine.errors import ModelError

_FIRST_LINE = b"version https://git-lfs.github.com/spec/"
_LARGEST = 1024  # bytes; a pointer has about 130
_ENDINGS = (".safetensors", ".json", ".gguf", ".pt", ".onnx", ".model")


def refuse_pointers(path: Path) -> None:
    """Raises ModelError if a file of the model, which is a file or a directory, is a pointer."""
    directory = path if path.is_dir() else path.parent
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    pointers = [file.name for file in files if file.suffix in _ENDINGS and _is_pointer(file)]
    if pointers:
        more = f" and {len(pointers) - 1} more" if len(pointers) > 1 else ""
        raise ModelError(
            f"{directory / pointers[0]}{more}: a Git LFS pointer, not the file itself. "
            f"Fetch the files: git -C {directory} lfs pull"
        )


def _is_pointer(file: Path) -> bool:
    try:
        if not file.is_file() or file.stat().st_size > _LARGEST:
            return False
        with file.open("rb") as opened:
            return opened.read(len(_FIRST_LINE)) == _FIRST_LINE
    except OSError:
        return False  # whoever needs it says why it cannot be read
