"""Whisper: two convolutions make states of a log-mel spectrogram, then a transformer as mBART's.

The encoder's positions are sinusoids, which checkpoints hold as a table; the decoder's are learned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bequest.engine.layers.ops import Ops
from bequest.engine.layers.start import StartRows
from bequest.engine.layers.stream import Stream
from bequest.engine.layers.weight import Table, Weight
from bequest.engine.models.batch import EncoderInputs, ModelInput
from bequest.engine.models.encoder_decoder import EncoderDecoderParts
from bequest.engine.models.encoder_decoder_config import WhisperConfig
from bequest.engine.models.families.bart import stack
from bequest.engine.models.reader import Reader

KERNEL = 3  # frames under each convolution, centred
MARGIN = KERNEL // 2  # frames of zeros around an input


def describe(config: WhisperConfig, read: Reader) -> EncoderDecoderParts:
    vocabulary, hidden, encoder = config.vocab_size, config.hidden_size, config.encoder
    at, decoder = read.under("model.encoder."), read.under("model.decoder.")
    table = decoder.weight("embed_tokens", vocabulary, hidden)
    inputs = WhisperInputs(
        _convolution(at.under("conv1."), encoder.num_mels, hidden, stride=1),
        _convolution(at.under("conv2."), hidden, hidden, stride=encoder.frames_per_state),
        at.table("embed_positions", encoder.max_len, hidden),
        table,
        decoder.table("embed_positions", config.max_position, hidden),
    )
    encoding, decoding = (stack(config, read, name, pre_norm=True, key_bias=False) for name in ("encoder", "decoder"))
    output = table if config.tie_word_embeddings else read.weight("proj_out", vocabulary, hidden)
    return EncoderDecoderParts(inputs, encoding, decoding, output)


def _convolution(at: Reader, channels: int, hidden: int, stride: int) -> Convolution:
    weight = at.tensor("weight", (hidden, channels, KERNEL))
    matrix = weight.transpose(1, 2).flatten(1).contiguous()
    return Convolution(at.made(matrix, at.vector("bias", hidden)), stride)


@dataclass(frozen=True, slots=True)
class Convolution:
    """Over time, with zeros around an input and a GELU behind; a product with every window's rows side by side."""

    product: Weight  # [H, KERNEL * C]
    stride: int

    def write(self, padded: Tensor, out: Tensor) -> None:
        """[MARGIN + frames + MARGIN, C], dense, with zeros around it → out [ceil(frames / stride), H]."""
        channels = padded.shape[1]
        # Windows overlap: a backend that reads rows where they lie needs no copy of them.
        windows = padded.as_strided((len(out), KERNEL * channels), (self.stride * channels, 1))
        self.product.activated(windows, "gelu", out)

    def num_results(self, frames: int) -> int:
        return -(-frames // self.stride)


@dataclass(frozen=True, slots=True)
class WhisperInputs:
    """Inputs."""

    conv1: Convolution
    conv2: Convolution
    encoder_positions: Table
    table: Weight
    decoder_positions: Table

    def encoder(self, batch: EncoderInputs, ops: Ops) -> Stream:
        positions = self.encoder_positions.rows(batch.positions)  # [E, H]
        states = torch.empty_like(positions)
        first = 0
        for features in batch.features:
            num_mels, frames = features.shape
            last = first + self.conv2.num_results(frames)
            mels = _with_margins(positions, frames, num_mels)
            mels[MARGIN:-MARGIN] = features.T
            inner = _with_margins(positions, frames, positions.shape[1])
            self.conv1.write(mels, inner[MARGIN:-MARGIN])
            self.conv2.write(inner, states[first:last])
            first = last
        return Stream(ops, positions, states)

    def decoder(self, batch: ModelInput, ops: Ops) -> StartRows:
        return StartRows(batch.input_ids, self.table, batch.last_tokens, batch.positions, self.decoder_positions)


def _with_margins(like: Tensor, frames: int, width: int) -> Tensor:
    """[MARGIN + frames + MARGIN, width], zeros at both ends, the rest not yet written."""
    rows = like.new_empty(frames + 2 * MARGIN, width)
    rows[:MARGIN] = rows[-MARGIN:] = 0
    return rows
