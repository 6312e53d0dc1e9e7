"""Which reader a checkpoint of another format than Hugging Face's needs."""

from __future__ import annotations

from pathlib import Path

from bequest.engine.models.foreign_checkpoint import ForeignCheckpoint


def open_foreign(path: Path) -> ForeignCheckpoint | None:
    """A .pt file of OpenAI's Whisper or a directory with one, or a directory with a T5 in two .onnx files; the
    tokenizer.json lies beside them. None: neither of these."""
    if path.is_dir():
        if (path / "encoder.onnx").is_file() and (path / "decoder.onnx").is_file():
            from bequest.engine.models.onnx_t5 import open_onnx_t5

            return open_onnx_t5(path)
        files = sorted(path.glob("*.pt"))
        if (path / "config.json").exists() or len(files) != 1:
            return None
        path = files[0]
    if path.suffix != ".pt":
        return None
    from bequest.engine.models.whisper_pt import open_whisper_pt

    return open_whisper_pt(path)
