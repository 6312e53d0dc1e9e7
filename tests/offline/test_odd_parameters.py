"""Whatever a script gives for a parameter, it gets an answer or one of our errors, and the engine goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bequest import LLM, RequestError, SamplingParams

FLAGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_model_len": 256, "num_blocks": 100, "max_num_seqs": 4,
}  # fmt: skip
NUMBERS: list[Any] = [
    0, 1, -1, 2, 7, 200, 2**31, 2**63, 2**64, -(2**63), 10**40, 0.0, -0.0, 0.5, 1e-300, 1e300, -1e9, True, False,
    float("nan"), float("inf"), float("-inf"), np.float32(0.5), np.int64(3), np.nan,
]  # fmt: skip
TEXTS: list[Any] = ["", " ", "the", "x" * 2000, "\x00", "\ud800", "ü", b"the", b"\xff"]
OTHERS: list[Any] = [
    None, object(), [], (), {}, set(), {5}, [[]], range(3), np.arange(3), np.zeros((2, 2)), np.array(3), lambda: 0, 1j,
]  # fmt: skip
NAMES = [field.name for field in dataclasses.fields(SamplingParams)]


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(tiny_model("llama"), **FLAGS) as llm:
        yield llm
        assert llm._async.core.context.engine.num_open == 0, "whatever failed is not left running"


def odd(draw: random.Random) -> Any:
    one = draw.choice([*NUMBERS, *TEXTS, *OTHERS])
    match draw.randrange(5):
        case 0:
            return [draw.choice([*NUMBERS, *TEXTS, *OTHERS]) for _ in range(draw.randrange(4))]
        case 1:
            key = draw.choice([*NUMBERS, *TEXTS, None, "regex", "json", "type", "choice", "grammar"])
            return {key: draw.choice([*NUMBERS, *TEXTS, *OTHERS])}
        case _:
            return one


@pytest.mark.parametrize("name", NAMES)
def test_each_parameter(llm: LLM, name: str) -> None:
    draw = random.Random(name)
    for value in [*NUMBERS, *TEXTS, *OTHERS, *(odd(draw) for _ in range(60))]:
        with contextlib.suppress(RequestError):
            llm.generate([5, 6], SamplingParams(**{"max_tokens": 2, name: value}))


def test_several_at_once(llm: LLM) -> None:
    expected = llm.generate([5, 6, 7], SamplingParams(max_tokens=5, temperature=0)).token_ids
    draw = random.Random(1)
    for _ in range(300):
        given = {name: odd(draw) for name in draw.sample(NAMES, draw.randrange(1, 5))}
        with contextlib.suppress(RequestError):
            llm.generate([5, 6], SamplingParams(**({"max_tokens": 2} | given)))
    assert llm.generate([5, 6, 7], SamplingParams(max_tokens=5, temperature=0)).token_ids == expected


@pytest.mark.parametrize("call", ["generate", "chat", "embed", "hidden_states", "score", "beam_search", "stream"])
def test_prompts(llm: LLM, call: str) -> None:
    draw = random.Random(call)
    values = [*NUMBERS, *TEXTS, *OTHERS, *(odd(draw) for _ in range(60))]
    for value in values:
        with contextlib.suppress(RequestError):
            match call:
                case "score":
                    llm.score("the cat", value)
                case "stream":
                    list(llm.stream(value, SamplingParams(max_tokens=2)))
                case "beam_search":
                    llm.beam_search(value, beam_width=2, max_tokens=2)
                case "generate" | "chat":
                    getattr(llm, call)(value, SamplingParams(max_tokens=2))
                case _:
                    getattr(llm, call)(value)
    assert llm.generate("the cat", SamplingParams(max_tokens=2)).usage.completion_tokens > 0
