"""Plans and results are data: numbers, arrays and handles, all the way down."""

from __future__ import annotations

import enum
import inspect
import itertools
import pickle
import types
import typing
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union

import numpy as np
import pytest
from msgspec.structs import replace

from bequest.engine.recording import Planned, Returned, decode, encode
from bequest.engine.types import Request, StepPlan, StepResult
from bequest.engine.types.data import Data, equal
from tests.engine.recorded_runs import records_of
from tests.engine.test_replay import recorded_world

MOST_FIELDS = 15


def described(kind: Any) -> tuple[list[str], bool, bool]:
    """The names of its fields, whether it is frozen, and whether its fields are given by their names alone."""
    if issubclass(kind, Data):
        parameters = inspect.signature(kind).parameters.values()
        keywords = all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters)
        return list(kind.__struct_fields__), kind.__struct_config__.frozen, keywords
    return [field.name for field in fields(kind)], kind.__dataclass_params__.frozen, False


def leaves(hint: Any, path: str, seen: set[type]) -> list[str]:
    """What of a type is no data: 'path: why'."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in (int, float, bool, str, bytes, None, type(None)) or origin is Literal:
        return []
    if origin is np.ndarray or (isinstance(hint, type) and issubclass(hint, enum.Enum)):
        return []
    if origin in (Union, types.UnionType) or origin is tuple:
        parts = [argument for argument in arguments if argument is not ...]
        return [wrong for part in parts for wrong in leaves(part, path, seen)]
    if not (isinstance(hint, type) and (is_dataclass(hint) or issubclass(hint, Data))):
        return [f"{path}: {hint} is no data"]
    if hint in seen:
        return []
    seen.add(hint)
    hints = typing.get_type_hints(hint)
    names, frozen, keywords = described(hint)
    wrong = [] if frozen else [f"{path}: {hint.__name__} is not frozen"]
    if len(names) > MOST_FIELDS:
        wrong.append(f"{path}: {hint.__name__} has {len(names)} fields")
    if len(names) > 3 and issubclass(hint, Data) and not keywords:
        wrong.append(f"{path}: {hint.__name__} is not keyword-only")
    return wrong + [bad for name in names for bad in leaves(hints[name], f"{path}.{name}", seen)]


@pytest.mark.parametrize("root", [StepPlan, StepResult])
def test_the_types_hold_nothing_else(root: type) -> None:
    seen: set[type] = set()
    assert leaves(root, root.__name__, seen) == []
    assert len(seen) > 2


def test_what_is_no_data_is_found() -> None:
    assert any("grammar" in wrong for wrong in leaves(Request, "Request", set()))


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> list[StepPlan | StepResult]:
    """Plans and results of a world with encoders, beams and hidden states."""
    path = tmp_path_factory.mktemp("world") / "recording"
    with pytest.MonkeyPatch.context() as patch:
        recorded_world(path, 204, 300, patch, most_encoder=50)
    records = records_of(Path(path))
    plans = [record.plan for record in records if isinstance(record, Planned)]
    results = [record.result for record in records if isinstance(record, Returned)]
    assert any(plan.beams for plan in plans) and any(plan.taps for plan in plans) and any(p.encoders for p in plans)
    return [*plans, *results]


def test_they_can_be_pickled(passed: list[StepPlan | StepResult]) -> None:
    for value in passed:
        again = pickle.loads(pickle.dumps(value))
        assert again == value and again is not value


def test_they_can_be_logged(passed: list[StepPlan | StepResult]) -> None:
    for value in passed[:50]:
        assert repr(value).startswith(f"{type(value).__name__}(step={value.step}, ")
    for value in passed:
        record = Planned(value) if isinstance(value, StepPlan) else Returned(value)
        assert decode(encode(record)) == record


def test_they_are_compared_by_what_they_hold(passed: list[StepPlan | StepResult]) -> None:
    plans = [value for value in passed if isinstance(value, StepPlan)]
    assert all(one != other for one, other in itertools.pairwise(plans))
    plan = next(plan for plan in plans if len(plan.samples))
    for other in (
        replace(plan, samples=replace(plan.samples, rows=plan.samples.rows + 1)),
        replace(plan, samples=replace(plan.samples, rows=plan.samples.rows.astype(np.int64))),
        replace(plan, samples=replace(plan.samples, drafts=plan.samples.rows)),
        replace(plan, batch=replace(plan.batch, block_tables=plan.batch.block_tables[:, :, :0])),
        replace(plan, rows=replace(plan.rows, close=(*plan.rows.close, 1))),
    ):
        assert plan != other
    assert plan == replace(plan, batch=replace(plan.batch, positions=plan.batch.positions.copy()))
    with pytest.raises(TypeError):
        hash(plan)


def test_equality_looks_at_bits() -> None:
    nan = np.asarray([np.nan], np.float32)
    assert equal(nan, nan.copy()) and not equal(np.zeros(1, np.float32), -np.zeros(1, np.float32))
    assert not equal(1, True) and not equal((1, 2), (1,)) and equal(((1,), nan), ((1,), nan.copy()))
