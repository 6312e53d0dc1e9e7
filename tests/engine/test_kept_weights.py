"""Weights of a model that sleeps: tensors lose their memory, and have it and their values again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from bequest.engine.layers.parts import Norm
from bequest.engine.models.loaded import LoadedModel
from bequest.engine.runner import kept_weights
from bequest.engine.runner.kept_weights import KeptWeights

CPU = torch.device("cpu")


class NoPlaces:
    """Places: there are no adapters."""

    def put_away(self) -> None:
        pass

    def bring_back(self) -> None:
        pass


def loaded_of(*parts: object, num_bytes: int) -> LoadedModel:
    return cast(LoadedModel, SimpleNamespace(model=parts, weight_bytes=num_bytes))


def test_values_and_shared_memory_come_back() -> None:
    matrix = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    norm, view = Norm(torch.full((6,), 3.0), 1e-5), matrix[1:3]
    module = torch.nn.Linear(3, 2)
    before = [tensor.clone() for tensor in (matrix, norm.weight, view, module.weight.data)]
    loaded = loaded_of({"a": [matrix]}, norm, (view,), module, num_bytes=48 + 24)
    weights = KeptWeights(loaded, CPU, NoPlaces())
    for _ in range(2):
        weights.put_away()
        weights.put_away()
        away = (matrix, norm.weight, view, module.weight)
        assert [tensor.untyped_storage().nbytes() for tensor in away] == [0] * 4
        assert weights.bring_back() is loaded
        for tensor, expected in zip((matrix, norm.weight, view, module.weight.data), before, strict=True):
            assert torch.equal(tensor, expected)
        matrix[1, 0], before[0][1, 0], before[2][0, 0] = 7, 7, 7
        assert view[0, 0] == 7, "they share their memory as before"


@pytest.mark.parametrize("why", ["no room", "not found"])
def test_they_are_read_again(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.ones(5)
    if why == "no room":
        monkeypatch.setattr(kept_weights, "host_memory", lambda: 39)
    weights = KeptWeights(loaded_of(matrix, num_bytes=20 if why == "no room" else 30), CPU, NoPlaces())
    weights.put_away()
    assert weights.bring_back() is None
    assert torch.equal(matrix, torch.ones(5)), "whoever has it still has it"


def test_no_memory_to_wake_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """All or nothing: what came back goes away again, and comes back later."""
    tensors = [torch.full((5,), float(i)) for i in range(3)]
    weights = KeptWeights(loaded_of(*tensors, num_bytes=60), CPU, NoPlaces())
    weights.put_away()
    assert weights._away is not None
    storage, size = weights._away._sizes[1]
    full = SimpleNamespace(resize_=_out_of_memory)
    weights._away._sizes[1] = cast(torch.UntypedStorage, full), size
    with pytest.raises(torch.cuda.OutOfMemoryError):
        weights.bring_back()
    weights._away._sizes[1] = storage, size
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0] * 3
    weights.bring_back()
    assert [tensor[0].item() for tensor in tensors] == [0.0, 1.0, 2.0]


def _out_of_memory(size: int) -> None:
    if size:
        raise torch.cuda.OutOfMemoryError("no memory")
