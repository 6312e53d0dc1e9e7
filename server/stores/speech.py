"""What a model that hears brings along: its control tokens, its features, and threads to make them on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from bequest.engine.audio import HOP, LogMel
from bequest.engine.text.whisper_tokens import WhisperTokens, whisper_tokens
from bequest.engine.types import ModelInfo
from bequest.engine.types.encoder import EncoderInfo
from bequest.server.interfaces import TokenizerLike

_WORKERS = 2  # as those for texts: numpy leaves the interpreter lock, but must not starve the engine of cores
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Speech:
    tokens: WhisperTokens
    encoder: EncoderInfo
    features: LogMel
    pool: ThreadPoolExecutor  # decodes files and makes features

    @property
    def window(self) -> int:
        """Samples."""
        return self.encoder.num_frames * HOP

    async def off_loop(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self.pool, work)


def speech_of(info: ModelInfo, tokenizer: TokenizerLike) -> Speech | None:
    """What it takes to transcribe with this model; None if it cannot hear."""
    if info.encoder is None or info.encoder.takes != "audio":
        return None
    tokens = whisper_tokens(tokenizer, info.vocab_size)
    if tokens is None:
        return None
    pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="audio")
    return Speech(tokens, info.encoder, LogMel(info.encoder.num_mels), pool)
