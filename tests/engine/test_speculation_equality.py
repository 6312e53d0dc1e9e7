"""Random requests with drafts and without: `python -m benchmarks.speculation_equality` in small."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.speculation_equality import METHODS, compare
from bequest.engine.models.any_config import parse_config, read_config


async def test_drafts_change_nothing(tiny_model: Callable[[str], Path]) -> None:
    counts = await compare(str(tiny_model("llama")), 2500, 10, METHODS)
    assert counts["off"]["drafted"] == 0 and counts["off"]["preempted"] > 0
    for method in METHODS:
        assert counts[method]["drafted"] > counts[method]["accepted"] > 20, method


async def test_drafts_change_nothing_where_windows_slide(tiny_model: Callable[[str], Path]) -> None:
    """What a window gives back behind a draft that was wrong must still be there for the next token."""
    model = tiny_model("gemma3")
    strips = len(parse_config(read_config(model), "config.json").strips.windows)
    assert strips > 1
    counts = await compare(str(model), 2500, 4, ("ngram", "prediction"), strips=strips)
    for method in ("ngram", "prediction"):
        assert counts[method]["drafted"] > counts[method]["accepted"] > 20, method


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next"])
async def test_drafts_change_nothing_where_layers_are_recurrent(name: str, tiny_model: Callable[[str], Path]) -> None:
    """A state that has passed a wrong token is left, and the one behind the last right token goes on."""
    methods = ("suffix", "prediction", "draft")  # its answers do not repeat themselves: no n-gram would be drafted
    counts = await compare(str(tiny_model(name)), 2000, 2, methods, draft_model=str(tiny_model("llama")))
    for method in ("suffix", "prediction"):
        assert counts[method]["drafted"] > counts[method]["accepted"] > 20, method
    assert counts["draft"]["drafted"] > 100
