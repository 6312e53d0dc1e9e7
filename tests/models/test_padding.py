"""Padded heads compute what the heads compute: on the CPU, which needs no padding, both can run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bequest.engine.backends.cpu.backend import CpuBackend
from bequest.engine.errors import ModelError
from bequest.engine.models.decoder import Decoder
from bequest.engine.models.families import decoders
from bequest.engine.models.load import open_checkpoint
from bequest.engine.models.padding import pad_heads
from bequest.engine.models.reader import Loader
from tests.models.paged import PagedSequences

TOKENS = list(range(3, 40))


def logits(directory: Path, sizes: tuple[int, ...]) -> torch.Tensor:
    checkpoint = open_checkpoint(directory)
    config, source = pad_heads(checkpoint.config, checkpoint.source, sizes)
    backend = CpuBackend()
    parts = decoders.describe(config, Loader(source, backend, torch.float32), config.max_position)
    model = Decoder(config, parts, backend)
    return PagedSequences(model, 1, len(TOKENS)).run(0, TOKENS, chunk=len(TOKENS))


@pytest.mark.parametrize("name", ["llama-odd-head", "llama-biases-tied-mha-gelu", "qwen3", "llama-yarn"])
def test_padding_changes_nothing(name: str, tiny_model: Callable[[str], Path]) -> None:
    directory = tiny_model(name)
    plain, padded = logits(directory, (16, 24, 32)), logits(directory, (64, 128))
    torch.testing.assert_close(padded, plain, rtol=1e-5, atol=1e-5)


def test_heads_that_are_too_large_are_refused(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match="heads of 32"):
        logits(tiny_model("qwen3"), (16,))


def test_a_layer_norm_of_heads_is_not_padded(tiny_model: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(tiny_model("cohere-plus"))
    with pytest.raises(ModelError, match="heads of 16 with a layer norm; the kernels take 64, 128"):
        pad_heads(checkpoint.config, checkpoint.source, (128, 64))
