"""Arrays → bytes, at the edges of pieces and of shapes, against the obvious way."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from bequest.engine.types.states import ChoiceStates, StatesPart, as_float32, convert
from bequest.server.answers import encoding
from bequest.server.answers.encoding import (
    GAP,
    Assembled,
    JsonBody,
    SafetensorsBody,
    base64_pieces,
    float_pieces,
    states_object,
)
from bequest.server.transport.pieces import gathered

SHAPES = [(1, 1, 1), (2, 3, 5), (1, 0, 4), (3, 0, 4), (2, 7), (1, 1), (4, 9, 33), (1, 40, 3), (40, 1, 3), (2, 2, 300)]


def states(shape: tuple[int, ...], dtype: Any = "float32") -> Assembled:
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    positions = np.arange(shape[1] if len(shape) == 3 else 3)
    return Assembled(tuple(range(shape[0])), positions, dtype, convert(values, "float32", dtype))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values_that_are_not_finite_are_no_warning(dtype: Any) -> None:
    """A mean of infinities, and signalling NaNs, of whose cast some chips warn: warnings are errors here."""
    signalling = np.full((2, 1, 1), 0x7F800001, np.uint32).view(np.float32)
    infinite = np.array([np.inf, -np.inf], np.float32).reshape(2, 1, 1)
    part = StatesPart(np.arange(2), np.concatenate([signalling, infinite], axis=2))
    made = ChoiceStates(0, (0,), np.arange(2), "mean", dtype, 2, (0,), "float32", (part,))
    assert np.isnan(as_float32(made.assemble(), dtype)).all()
    assert np.isnan(as_float32(convert(signalling, "float32", dtype), dtype)).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("step", [3, 48, 3 << 18])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_base64(shape: tuple[int, ...], step: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_BASE64_STEP", step)
    one = states(shape, dtype)
    assert b"".join(base64_pieces(one)) == b'"' + base64.b64encode(one.values.tobytes()) + b'"'


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("step", [1, 33, 100, 1 << 14])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_floats(shape: tuple[int, ...], step: int, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_FLOAT_STEP", step)
    one = states(shape, dtype)
    lists = json.loads(b"".join(float_pieces(one)))
    expected = as_float32(one.values, dtype)
    assert np.array_equal(np.asarray(lists, np.float32).reshape(shape), expected)
    assert np.asarray(lists).shape[: len(shape) - 1] == shape[:-1]


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_documents_around_numbers(encoding: Any) -> None:
    """Whatever is in the strings beside them."""
    answers = [states((2, 3, 5)), states((2, 7), "float16"), states((1, 0, 4))]
    value = {"name": '\0 \\u0000 "quoted" é\n', "data": [states_object(one, i) for i, one in enumerate(answers)]}
    body = JsonBody(value, answers, encoding)
    content = b"".join(body.pieces())
    assert body.size == (len(content) if encoding == "base64" else None)
    read = json.loads(content)
    assert read["name"] == value["name"]
    for entry, one in zip(read["data"], answers, strict=True):
        assert entry["positions"] == one.positions.tolist() and entry["shape"] == list(one.shape)
        if encoding == "base64":
            assert base64.b64decode(entry["data"]) == one.values.tobytes()


def test_a_gap_for_each_array() -> None:
    with pytest.raises(ValueError, match="argument"):
        b"".join(JsonBody([GAP, GAP], [states((1, 1))], "float").pieces())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_files(dtype: Any) -> None:
    answers = [states((2, 3, 5), dtype), states((2, 7), dtype), states((3, 0, 4), dtype)]
    body = SafetensorsBody(answers, {"id": "hs-é", "usage": "{}"})
    content = b"".join(body.pieces())
    assert len(content) == body.size
    tensors = safetensors.numpy.load(content)
    names = {f"{i}.layer.{layer}" for i, one in enumerate(answers) for layer in one.layers}
    assert set(tensors) == names | {f"{i}.positions" for i in range(3)}
    for i, one in enumerate(answers):
        assert np.array_equal(tensors[f"{i}.positions"], one.positions)
        for layer, values in zip(one.layers, one.values, strict=True):
            assert tensors[f"{i}.layer.{layer}"].shape == values.shape
            assert np.array_equal(tensors[f"{i}.layer.{layer}"], values)
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    assert header.pop("__metadata__") == {"id": "hs-é", "usage": "{}"} and size % 8 == 0
    for entry in header.values():
        assert entry["data_offsets"][0] % {"I64": 8, "F32": 4, "F16": 2}[entry["dtype"]] == 0, "aligned"


@pytest.mark.parametrize("least", [1, 4, 100])
def test_small_pieces_are_put_together(least: int) -> None:
    pieces = [b"a", b"bc", b"", memoryview(b"defgh"), b"i", b"jklm"]
    together = list(gathered(pieces, least))
    assert b"".join(together) == b"abcdefghijklm"
    assert len(together) == {1: 5, 4: 4, 100: 1}[least]
    assert list(gathered([], least)) == []
