"""Tensors that requests bring: what is read of them is what was written, and what is wrong with one is told."""

from __future__ import annotations

import io
import json
import pickle
import random
import zipfile
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save as save_safetensors

from bequest.engine.errors import InvalidRequest
from bequest.engine.formats.given_rows import read_rows

H = 8


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def refusal(data: bytes) -> str:
    with pytest.raises(InvalidRequest) as refused:
        read_rows(data, H)
    assert refused.value.reason == "embeds_unreadable"
    return str(refused.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_are_those_that_were_written(dtype: torch.dtype) -> None:
    rows = torch.randn(5, H).to(dtype)
    expected = rows.float().numpy()
    views = [rows, rows[None], rows.t().contiguous().t(), torch.nn.Parameter(rows), torch.cat([rows, rows])[:5]]
    for data in [*map(saved, views), save_safetensors({"any": rows}, {"a": "b"}), save_safetensors({"x": rows[None]})]:
        read = read_rows(data, H)
        assert read.dtype == np.float32 and read.flags.c_contiguous and np.array_equal(read, expected)


def test_what_is_no_rows_of_the_model() -> None:
    for shape in [(5, H + 1), (H,), (2, 5, H), (1, 1, 5, H), (0, H)]:
        assert f"its shape must be [tokens, {H}]" in refusal(saved(torch.zeros(shape)))
        assert f"its shape must be [tokens, {H}]" in refusal(save_safetensors({"x": torch.zeros(shape)}))
    for dtype, name in [(torch.int64, "I64"), (torch.float64, "F64")]:
        assert "its dtype must be float32, float16, bfloat16" in refusal(saved(torch.zeros(5, H, dtype=dtype)))
        assert f"not {name}" in refusal(save_safetensors({"x": torch.zeros(5, H, dtype=dtype)}))
    for value in (float("nan"), float("inf"), -float("inf")):
        rows = torch.zeros(5, H)
        rows[3, 2] = value
        assert "infinite" in refusal(saved(rows)) and "infinite" in refusal(save_safetensors({"x": rows}))
    assert "one tensor, not dict" in refusal(saved({"rows": torch.zeros(5, H)}))
    assert "one tensor" in refusal(save_safetensors({"x": torch.zeros(5, H), "y": torch.zeros(5, H)}))
    assert "neither" in refusal(b"") and "neither" in refusal(b"nothing of the kind")
    assert "cannot be read" in refusal(saved(torch.zeros(5, H).to_sparse()))


def test_no_pickle_runs() -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (print, ("it ran",))

    assert "neither" in refusal(pickle.dumps(Evil()))
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Evil(), protocol=2))
    assert "which this reader never does" in refusal(file.getvalue())


def test_what_a_file_says_of_itself_allocates_nothing() -> None:
    """A view of one number may stand for terabytes; a pickle may unpack to gigabytes."""
    many = torch.zeros(1).expand(1 << 30, H)
    assert "needs more bytes than it has" in refusal(saved(many))
    assert "its shape must be" in refusal(saved(torch.zeros(1).expand(1 << 50, H)))
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 24))
    assert len(file.getvalue()) < 1 << 16 and "of a sane size" in refusal(file.getvalue())
    head = json.dumps({"x": {"dtype": "F32", "shape": [1 << 30, H], "data_offsets": [0, H << 32]}}).encode()
    assert "is not that of its 0 bytes" in refusal(len(head).to_bytes(8, "little") + head)


def test_broken_files() -> None:
    draw = random.Random(5)
    for data in (saved(torch.randn(5, H)), save_safetensors({"x": torch.randn(5, H)})):
        for _ in range(300):
            broken = bytearray(data[: draw.randrange(len(data))] if draw.random() < 0.5 else data)
            for _ in range(draw.randrange(4)):
                if broken:
                    broken[draw.randrange(len(broken))] = draw.randrange(256)
            try:
                assert read_rows(bytes(broken), H).shape[1] == H
            except InvalidRequest as error:
                assert error.reason == "embeds_unreadable"
