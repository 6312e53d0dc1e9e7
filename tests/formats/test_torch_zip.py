"""Files of torch.save, read without running their pickle."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from bequest.engine.errors import ModelError
from bequest.engine.formats.torch_zip import StoredTensor, TorchZip


def saved(content: Any, path: Path) -> TorchZip:
    torch.save(content, path)
    return TorchZip(path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_tensors_come_back(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = torch.arange(60).reshape(3, 4, 5).to(dtype)
    tensors = {
        "whole": whole,
        "view": whole[1:, ::2, 1:3],
        "transposed": whole.transpose(0, 2),
        "scalar": torch.tensor(3).to(dtype),
        "empty": torch.empty((0, 4), dtype=dtype),
        "parameter": torch.nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False),
    }
    file = saved(
        {"dims": {"a": 1, "b": [1, 2.5, None, True], "c": ("x",)}, "tensors": OrderedDict(tensors)}, tmp_path / "a.pt"
    )
    assert file.content["dims"] == {"a": 1, "b": [1, 2.5, None, True], "c": ("x",)}
    assert file.content["tensors"].keys() == tensors.keys()
    for name, expected in tensors.items():
        stored = file.content["tensors"][name]
        assert isinstance(stored, StoredTensor) and stored.shape == expected.shape
        assert torch.equal(file.load(stored), expected) and file.load(stored).dtype == dtype


def test_a_state_dict_of_a_module(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2)
    file = saved(module.state_dict(), tmp_path / "a.pt")  # its _metadata is an attribute
    assert torch.equal(file.load(file.content["weight"]), module.weight)


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("made-by-a-pickle",)


class Built:
    def __init__(self) -> None:
        self.attribute = 1


@pytest.mark.parametrize("content", [Harmful(), {"a": Harmful()}, Built(), {"a": {1, 2}}, torch.nn.Linear(1, 1)])
def test_a_pickle_that_does_more_is_refused_and_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="pickle"):
        saved(content, tmp_path / "a.pt")
    assert not (tmp_path / "made-by-a-pickle").exists()


def test_tensors_that_reach_beyond_their_storage(tmp_path: Path) -> None:
    file = saved({"a": torch.ones(4)}, tmp_path / "a.pt")
    key = file.content["a"].storage
    for offset, shape, stride in (
        (1, (4,), (1,)),
        (0, (5,), (1,)),
        (0, (2, 2), (3, 1)),
        (-1, (2,), (1,)),
        (0, (4,), (-1,)),
    ):
        with pytest.raises(ModelError, match="beyond"):
            file.load(StoredTensor(key, torch.float32, offset, shape, stride))
    with pytest.raises(ModelError, match="strides"):
        file.load(StoredTensor(key, torch.float32, 0, (2, 2), (1,)))
    with pytest.raises(ModelError, match="missing"):
        file.load(StoredTensor("99", torch.float32, 0, (1,), (1,)))


def _repacked(archive: bytes, method: bytes) -> bytes:
    """With another method in each header, local ones and those of the directory."""
    data = bytearray(archive)
    for signature, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        place = data.find(signature)
        while place >= 0:
            data[place + offset : place + offset + 2] = method
            place = data.find(signature, place + 1)
    return bytes(data)


def test_files_that_are_something_else(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.ones(1000)}, path)
    whole = path.read_bytes()
    for data in (b"", b"no zip", whole[: len(whole) // 2], pickle.dumps({"a": 1})):
        path.write_bytes(data)
        with pytest.raises(ModelError, match=r"a\.pt"):
            TorchZip(path)
    for method in (b"\x63\x00", b"\x08\x00"):  # an unknown way of packing, and one that it is not packed in
        path.write_bytes(_repacked(whole, method))
        with pytest.raises(ModelError, match=r"a\.pt"):
            TorchZip(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/other", b"")
    with pytest.raises(ModelError, match=r"no data\.pkl"):
        TorchZip(path)
    for program in (b"", b"\x80\x02}", b"\x80\x02q\x00.", b"garbage", b"\x80\x02(u."):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", program)
        with pytest.raises(ModelError, match="pickle"):
            TorchZip(path)
