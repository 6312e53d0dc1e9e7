"""Which reader a checkpoint of another format than Hugging Face's needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bequest.engine.models.foreign_checkpoint import ForeignCheckpoint


def foreign_file(path: Path) -> Path | None:
    """What a reader of ours opens: a .pt file of OpenAI's Whisper, also as the only one in a directory, or a directory
    with a T5 in two .onnx files; the tokenizer.json lies beside them. None: neither of these."""
    if path.is_dir():
        if (path / "encoder.onnx").is_file() and (path / "decoder.onnx").is_file():
            return path
        files = sorted(path.glob("*.pt"))
        if (path / "config.json").exists() or len(files) != 1:
            return None
        path = files[0]
    return path if path.suffix == ".pt" else None


def open_foreign(path: Path) -> ForeignCheckpoint | None:
    found = foreign_file(path)
    if found is None:
        return None
    if found.is_dir():
        from bequest.engine.models.onnx_t5 import open_onnx_t5

        return open_onnx_t5(found)
    from bequest.engine.models.whisper_pt import open_whisper_pt

    return open_whisper_pt(found)
