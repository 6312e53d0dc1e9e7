"""What an encoder-decoder model is made of: one description that runners read, and what each family adds to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bequest.engine.errors import ModelError
from bequest.engine.models.config import Activation
from bequest.engine.models.strips import KvHeads, Strips, divide


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The half that reads a whole input at once. Its hidden size is the decoder's."""

    takes: Literal["tokens", "audio"]
    num_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    max_len: int  # states of the longest input
    num_mels: int = 0  # of audio: bins of a frame
    frames_per_state: int = 1  # of audio


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoderConfig:
    """Members without "encoder" in their name are the decoder's. Self and cross attention have the same heads."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int  # the longest sequence the decoder can be asked for
    norm_eps: float
    activation: Activation
    attention_scale: float
    tie_word_embeddings: bool
    encoder: EncoderConfig
    own_tables: frozenset[str] = frozenset()  # stacks, "encoder" and "decoder", that do not read the shared embedding
    head_padding: int = 0  # zeros at the end of each head, counted in both head_dims (padding.py)

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "num_layers", "num_heads", "head_dim", "intermediate_size", "vocab_size")
        for name in (*sizes, "max_position"):
            if getattr(self, name) < 1:
                raise ModelError(f"{self.architecture}: {name} must be positive, not {getattr(self, name)}")
        for name in ("num_layers", "num_heads", "head_dim", "intermediate_size", "max_len"):
            if getattr(self.encoder, name) < 1:
                raise ModelError(f"{self.architecture}: the encoder's {name} must be positive")
        if self.encoder.head_dim != self.head_dim:
            raise ModelError(f"{self.architecture}: heads of the encoder and the decoder must have the same size")

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def sliding_windows(self) -> tuple[int, ...]:
        """[L]: every layer sees all tokens before."""
        return (0,) * self.num_layers

    @property
    def strips(self) -> Strips:
        return divide(self.sliding_windows, [KvHeads(self.num_kv_heads, self.head_dim)] * self.num_layers)

    def kv_shape(self, block_size: int) -> tuple[int, ...]:
        """[L, 2, NKV, BS, D]: one block of the cache, of a self or of a cross table."""
        return (self.num_layers, 2, self.num_kv_heads, block_size, self.head_dim)

    def scratch_shape(self, block_size: int) -> tuple[int, ...]:
        """[1, 2, NKV, BS, D]: one block of what an encoder's layer attends to, used by one layer after another."""
        return (1, 2, self.encoder.num_heads, block_size, self.head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class BartConfig(EncoderDecoderConfig):
    """Learned positions and layer norms: behind each sublayer (BART), or before it and at the end (mBART)."""

    pre_norm: bool
    embedding_scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Config(EncoderDecoderConfig):
    """RMS norms before each sublayer; positions are a bias on the scores of self attention, by distance."""

    gated: bool  # the activation is of a gate
    num_buckets: int
    max_distance: int  # from here on the bias is the same
    output_scale: float  # of the states that logits are made from

    @property
    def sliding_windows(self) -> tuple[int, ...]:
        """Wider than any sequence. Layers without a window may read keys that sequences share once for all of them, and
        a bias by distance is each one's own."""
        return (1 << 28,) * self.num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperConfig(EncoderDecoderConfig):
    """Two convolutions over a log-mel spectrogram, then layers as mBART's."""
