"""Whisper: two convolutions make states of a log-mel spectrogram, then a transformer as mBART's.

The encoder's positions are sinusoids, which checkpoints hold as a table; the decoder's are learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bequest.engine.kernels.cpu_stack import StackEmbedding
from bequest.engine.models.backend import CpuBackend
from bequest.engine.models.bart import decoder_layer, encoder_layer, layer_tensors, position_table
from bequest.engine.models.batch import EncoderInputs, ModelInput
from bequest.engine.models.encoder_decoder import EncoderDecoder, PreNorm, load_layers
from bequest.engine.models.encoder_decoder_config import WhisperConfig
from bequest.engine.models.layers import Embedding, LayerNorm, Linear, Loader

KERNEL = 3  # frames under each convolution, centred
MARGIN = KERNEL // 2  # frames of zeros around an input


class Whisper(EncoderDecoder):
    stream = PreNorm

    def __init__(self, config: WhisperConfig, loader: Loader) -> None:
        """The loader's source has passed check_tensors."""
        self.config = config
        self._backend = loader.backend
        self._conv1 = Convolution.load(loader, "model.encoder.conv1", stride=1)
        self._conv2 = Convolution.load(loader, "model.encoder.conv2", stride=config.encoder.frames_per_state)
        self._dtype = loader.dtype if loader.backend.device.type != "cpu" else torch.float32  # of activations
        self._embedding = Embedding.load(loader, "model.decoder.embed_tokens")
        self._encoder_positions = position_table(loader, "model.encoder.embed_positions")
        self._decoder_positions = position_table(loader, "model.decoder.embed_positions")
        self.tables = [self._embedding, self._encoder_positions, self._decoder_positions]
        self.encoder_layers = load_layers(partial(encoder_layer, config, loader), config.encoder.num_layers)
        self.decoder_layers = load_layers(partial(decoder_layer, config, loader), config.num_layers)
        self.encoder_norm = LayerNorm.load(loader, "model.encoder.layer_norm", config.norm_eps)
        self.decoder_norm = LayerNorm.load(loader, "model.decoder.layer_norm", config.norm_eps)
        tied = config.tie_word_embeddings
        self.output = self._embedding.as_linear() if tied else Linear.load(loader, ["proj_out"], has_bias=False)

    def embed_encoder(self, batch: EncoderInputs) -> Tensor:
        if isinstance(self._backend, CpuBackend):
            return self.encoder_stream(batch).state()
        rows = [item.T.to(self._dtype) for item in batch.features]  # [frames, n_mels] each
        states = self._conv2(self._conv1(rows))
        return torch.cat(states).add_(self._encoder_positions(batch.positions, None))

    def encoder_stream(self, batch: EncoderInputs) -> PreNorm:
        """On the CPU, without copies of the windows: products read them where they lie, overlapping."""
        states = torch.empty(len(batch.positions), self.config.hidden_size)
        first = 0
        for features in batch.features:
            num_mels, frames = features.shape
            mels = torch.empty(frames + 2 * MARGIN, num_mels)
            inner = torch.empty(frames + 2 * MARGIN, self.config.hidden_size)
            for padded in (mels, inner):
                padded[:MARGIN] = padded[-MARGIN:] = 0
            mels.numpy()[MARGIN:-MARGIN] = features.numpy().T  # twice as fast as torch's
            self._conv1.write(mels, inner[MARGIN:-MARGIN])
            last = first + self._conv2.num_results(frames)
            self._conv2.write(inner, states[first:last])
            first = last
        return PreNorm(states, self._encoder_positions(batch.positions, None))

    def embed_decoder(self, batch: ModelInput) -> Tensor:
        tokens = self._embedding(batch.input_ids, batch.last_tokens)
        return tokens.add_(self._decoder_positions(batch.positions, None))

    def decoder_rows(self, batch: ModelInput) -> StackEmbedding:
        rows = self._decoder_positions.weight
        return StackEmbedding(batch.input_ids, self._embedding.weight, batch.positions, rows)


class Convolution:
    """Over time, with zeros around an input and a GELU behind; a product with every window's rows side by side."""

    def __init__(self, product: Linear, stride: int) -> None:
        self.product = product  # [H, KERNEL * C]
        self.stride = stride

    @classmethod
    def load(cls, loader: Loader, name: str, stride: int) -> Convolution:
        weight = loader.source.load(f"{name}.weight")  # [H, C, KERNEL]
        matrix = loader.backend.matrix([weight.transpose(1, 2).flatten(1).contiguous()], loader.dtype)
        return cls(Linear(loader.backend, matrix, loader.vector([f"{name}.bias"])), stride)

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """[frames, C] each → [ceil(frames / stride), H] each"""
        windows = [self._windows(F.pad(item, (0, 0, MARGIN, MARGIN)).contiguous()) for item in inputs]
        product = self.product
        states = product.backend.activated_linear(torch.cat(windows), product.weight, product.bias, "gelu")
        return list(states.split([len(item) for item in windows]))

    def write(self, padded: Tensor, out: Tensor) -> None:
        """[MARGIN + frames + MARGIN, C] on the CPU, with zeros around it → out [ceil(frames / stride), H]."""
        product = self.product
        assert isinstance(product.backend, CpuBackend)
        product.backend.activated_linear(self._windows(padded), product.weight, product.bias, "gelu", out)

    def num_results(self, frames: int) -> int:
        return -(-frames // self.stride)

    def _windows(self, padded: Tensor) -> Tensor:
        """[MARGIN + frames + MARGIN, C], dense → [ceil(frames / stride), KERNEL * C], overlapping"""
        rows, channels = padded.shape
        count = self.num_results(rows - 2 * MARGIN)
        return padded.as_strided((count, KERNEL * channels), (self.stride * channels, 1))


def expected_tensors(config: WhisperConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model and its shape."""
    hidden, encoder = config.hidden_size, config.encoder
    shapes: dict[str, tuple[int, ...]] = {
        "model.encoder.conv1.weight": (hidden, encoder.num_mels, KERNEL),
        "model.encoder.conv1.bias": (hidden,),
        "model.encoder.conv2.weight": (hidden, hidden, KERNEL),
        "model.encoder.conv2.bias": (hidden,),
        "model.encoder.embed_positions.weight": (encoder.max_len, hidden),
        "model.decoder.embed_positions.weight": (config.max_position, hidden),
        "model.decoder.embed_tokens.weight": (config.vocab_size, hidden),
    }
    if not config.tie_word_embeddings:
        shapes["proj_out.weight"] = (config.vocab_size, hidden)
    for stack in ("encoder", "decoder"):
        shapes |= {f"model.{stack}.layer_norm.{part}": (hidden,) for part in ("weight", "bias")}
    return shapes | layer_tensors(config, unbiased=("k_proj",))
