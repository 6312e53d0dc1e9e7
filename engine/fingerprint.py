"""A fingerprint of a model's weights: keys and values of one model must not be taken for another's.

Of a large file every 64 KiB give their first bytes: a matrix that was changed shows, and 16 GB take a part of a second.
The files may be replaced under a running server, whose weights are then not theirs any more; so their sizes and times
are noted when it starts, and must still be the same when the fingerprint is taken.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from bequest.engine.errors import InternalError

_STRIDE = 1 << 16
_SAMPLE = 64
_SMALL = 64 << 20  # bytes of a file that is read whole
_WEIGHTS = (".safetensors", ".gguf", ".onnx", ".pt", ".bin")


class Fingerprint:
    def __init__(self, path: Path, quantization: str = "auto") -> None:
        """`path`: a model's folder, or its one file; `quantization`: what is made of its weights."""
        self._path = path
        self._quantization = quantization
        self._noted = self._note()

    def __call__(self) -> str:
        """Reads the files: not for the event loop. Raises InternalError if they have changed."""
        if self._note() != self._noted:
            raise InternalError("The files of the model have changed since it was loaded.")
        digest = hashlib.blake2b(digest_size=16)
        if self._quantization != "auto":
            digest.update(f"{self._quantization}\0".encode())
        for file in self._files():
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            digest.update(file.read_bytes() if file.suffix == ".json" else _samples(file))
        return digest.hexdigest()

    def _files(self) -> list[Path]:
        if self._path.is_file():
            return [self._path]
        return sorted(f for f in self._path.iterdir() if f.suffix in _WEIGHTS or f.name == "config.json")

    def _note(self) -> list[tuple[str, int, int]]:
        return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in self._files()]


def _samples(file: Path) -> bytes:
    if file.stat().st_size < _SMALL:
        return file.read_bytes()
    content = np.memmap(file, np.uint8, mode="r")
    whole = len(content) // _STRIDE * _STRIDE
    return content[:whole].reshape(-1, _STRIDE)[:, :_SAMPLE].tobytes() + content[-_SAMPLE:].tobytes()
