"""What the encoder of an encoder-decoder model reads, and what the model wants of its decoder.

Dims: E positions of all encoder inputs of a step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from bequest.engine.errors import ContextLengthExceeded, InvalidRequest
from bequest.engine.types.data import Data
from bequest.engine.types.listening import Alignment

Features = npt.NDArray[np.float32]
Slots = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """What one request's encoder reads. Equal keys mean equal inputs, whose cross blocks a tenant's requests share."""

    key: bytes  # exact: the tokens themselves, or a digest of the features
    length: int  # positions that the decoder attends to
    token_ids: tuple[int, ...] = field(default=(), compare=False)  # of text
    features: Features | None = field(default=None, compare=False, repr=False)  # [n_mels, frames] of audio

    def __post_init__(self) -> None:
        assert self.length >= 1, "an encoder input has at least one position"
        assert (self.features is None) == (len(self.token_ids) == self.length)

    @classmethod
    def of_tokens(cls, token_ids: Iterable[int]) -> EncoderInput:
        ids = tuple(token_ids)
        return cls(b"t" + np.asarray(ids, dtype="<i4").tobytes(), len(ids), token_ids=ids)

    @classmethod
    def of_audio(cls, features: Features, frames_per_position: int) -> EncoderInput:
        """`features`: [n_mels, frames] float32, not written to any more; the stem makes one position of so many."""
        num_mels, frames = features.shape
        digest = hashlib.blake2b(np.ascontiguousarray(features).data, digest_size=32).digest()
        key = b"a" + num_mels.to_bytes(4, "little") + frames.to_bytes(4, "little") + digest
        return cls(key, -(-frames // frames_per_position), features=features)


@dataclass(frozen=True, slots=True)
class TimestampRule:
    """Whisper's, of transcripts with timestamps (engine/runner/timestamps.py)."""

    first: int  # <|0.00|>
    end: int  # <|endoftext|>


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Tokens that a model's generation_config forbids or forces, as `transformers` does in generate."""

    never: tuple[int, ...] = ()
    not_first: tuple[int, ...] = ()  # of the sampled ones
    first: int | None = None  # the first sampled token
    last: int | None = None  # the max_tokens-th
    timestamps: TimestampRule | None = None

    def opening(self, max_tokens: int) -> int | None:
        """The token that is known before anything is computed. One that is the last, too, waits for its turn."""
        return self.first if max_tokens > 1 else None

    def closing(self, max_tokens: int) -> int | None:
        """The token that replaces the max_tokens-th."""
        return self.first if self.last is None and max_tokens == 1 else self.last


@dataclass(frozen=True, slots=True)
class EncoderInfo:
    """What the server has to know of an encoder-decoder model."""

    takes: Literal["tokens", "audio"]
    max_len: int  # positions of one encoder input, within what the engine was started for
    decoder_start_token_id: int
    default_decoder_prompt: tuple[int, ...]  # begins with the start token
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    num_mels: int = 0  # of audio
    num_frames: int = 0  # of audio: a whole window
    frames_per_position: int = 1  # of audio
    num_layers: int = 0  # of the encoder
    alignment: Alignment | None = None  # of audio: the heads that say when a token was spoken; None: nobody asks them

    def decoder_prompt(self, token_ids: Iterable[int] | None) -> tuple[int, ...]:
        """The tokens with the start token before them, unless it is there; None: the model's default."""
        if token_ids is None:
            return self.default_decoder_prompt
        ids = tuple(token_ids)
        return ids if ids[:1] == (self.decoder_start_token_id,) else (self.decoder_start_token_id, *ids)

    def rules(self, num_decoder_prompt: int, *, ends: bool = True) -> TokenRules | None:
        """Of a request with a decoder prompt of so many tokens: BOS is forced right behind the start token alone.

        `ends`: it ends at an end token, so that one may be forced at its last length.
        """
        first = self.forced_bos_token_id if num_decoder_prompt == 1 else None
        last = self.forced_eos_token_id if ends else None
        rules = TokenRules(self.suppress_tokens, self.begin_suppress_tokens, first, last)
        return None if rules == TokenRules() else rules

    def check_length(self, length: int) -> None:
        """Raises ContextLengthExceeded for an encoder input that does not even fit alone."""
        if length > self.max_len:
            unit = "tokens" if self.takes == "tokens" else "positions"
            raise ContextLengthExceeded(
                f"The encoder takes {self.max_len} {unit} at most, not {length}.",
                reason="encoder_input_too_long",
                field="encoder",
                details={"max_encoder_len": self.max_len, "encoder_tokens": length},
                unit=unit,
            )


def check_encoder(encoder: EncoderInput | None, info: EncoderInfo | None) -> None:
    """Whether a request brings what its model reads. The server says the same earlier, and names the field."""
    if info is None and encoder is not None:
        raise InvalidRequest("This model has no encoder.", reason="no_encoder", field="encoder")
    if info is not None and encoder is None:
        raise InvalidRequest(f"This model's encoder has no {info.takes} to read.", reason=f"encoder_needs_{info.takes}")
    if info is not None and encoder is not None:
        if (encoder.features is not None) != (info.takes == "audio"):
            raise InvalidRequest(
                f"This model's encoder reads {info.takes}.",
                reason="wrong_encoder_input",
                field="encoder",
                takes=info.takes,
            )
        info.check_length(encoder.length)


class EncoderSpec(Data, frozen=True, eq=False):
    """One run of the encoder in a step: the cross keys and values of position i go to `slots[i]` of every layer."""

    input: EncoderInput
    slots: Slots | None  # [input.length]; None: it runs for its hidden states alone
    adapter: int = 0  # the handle of a LoRA adapter; 0: none
