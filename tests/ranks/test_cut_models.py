"""Models cut into parts against whole ones: the same logits within rounding, of every family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

from bequest.engine.errors import ModelError
from bequest.engine.models.decoder import Decoder
from bequest.engine.models.load import load_model
from tests.models.paged import PagedSequences
from tests.ranks.threads import ThreadRanks, on_ranks
from tests.tiny_models import TINY_MODELS, VOCAB_SIZE

LENGTH = 23


def logits_of(path: Path, ranks: ThreadRanks | None = None) -> Tensor:
    """[LENGTH, V]"""
    loaded = load_model(path) if ranks is None else load_model(path, ranks=ranks)
    assert isinstance(loaded.model, Decoder)
    tokens = torch.randint(VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    return PagedSequences(loaded.model, 1, LENGTH).run(0, tokens, chunk=9)


def assert_near(actual: Tensor, expected: Tensor, relative: float = 1e-5) -> None:
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < relative, f"relative error {error:.2e}"


TOO_FEW_HEADS = {("qwen3.5-wide", 4), ("qwen3.5-moe-wide", 4)}  # of recurrent values
# One of each kind is part of every run: windows, caps, biases, norms over all heads, layers in parallel, experts with
# biases and shared ones, recurrent layers.
EVERY_RUN = {"llama-biases-tied-mha-gelu", "gemma2", "olmo2", "cohere2", "gpt-oss", "glm4-moe", "qwen3-next"}


def cases() -> list[ParameterSet]:
    names = [name for name in TINY_MODELS if not name.startswith("gemma4")]  # which is not cut
    pairs = [(name, size) for name in names for size in (2, 4) if (name, size) not in TOO_FEW_HEADS]
    return [
        pytest.param(name, size, marks=[] if name in EVERY_RUN and size == 4 else pytest.mark.cluster)
        for name, size in pairs
    ]


@pytest.mark.parametrize("name, size", cases())
def test_the_parts_of_a_decoder_give_what_it_gives(name: str, size: int, tiny_model: Callable[[str], Path]) -> None:
    path = tiny_model(name)
    expected = logits_of(path)
    parts = on_ranks(size, lambda ranks: logits_of(path, ranks))
    for part in parts:
        assert torch.equal(part, parts[0])
    assert_near(parts[0], expected)


@pytest.mark.parametrize(
    "name, size, told",
    [
        ("qwen3.5-wide", 4, "2 heads of recurrent values, which 4 ranks cannot share evenly"),
        ("llama", 3, "4 heads, which 3 ranks cannot share evenly"),
        ("mixtral", 5, "4 heads, which 5"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_by_name(
    name: str, size: int, told: str, tiny_model: Callable[[str], Path]
) -> None:
    with pytest.raises(ModelError, match=f"^tensor_parallel_size={size}: .* has {told}"):
        load_model(tiny_model(name), ranks=ThreadRanks.alone(size))
