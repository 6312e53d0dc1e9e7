"""What a request leaves open is sampled as the model says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bequest.engine.config import EngineConfig
from bequest.engine.errors import ModelError
from bequest.engine.models.generation import GenerationDefaults
from bequest.engine.runner.model_info import default_sampling


def loaded(**sampling: float) -> Any:
    return SimpleNamespace(generation=GenerationDefaults((0,), sampling))


def test_the_models_own_are_taken_unless_told_otherwise() -> None:
    own = {"temperature": 0.6, "top_k": 20}
    assert default_sampling(EngineConfig(model="m"), loaded(**own)) == own
    assert default_sampling(EngineConfig(model="m", generation_config="none"), loaded(**own)) == {}
    assert default_sampling(EngineConfig(model="m"), loaded()) == {}


def test_the_embedded_model_has_those_of_its_authors() -> None:
    assert default_sampling(EngineConfig(), loaded()) == {"temperature": 0.2, "top_p": 0.9}
    assert default_sampling(EngineConfig(generation_config="none"), loaded()) == {}


@pytest.mark.parametrize(
    "sampling", [{"temperature": 3.0}, {"top_p": -0.1}, {"top_k": -2}, {"min_p": 1.5}, {"repetition_penalty": 0.0}]
)
def test_values_that_no_request_may_have(sampling: dict[str, float]) -> None:
    [(name, value)] = sampling.items()
    with pytest.raises(ModelError, match=f"generation config has {name} {value:g}, which must be from"):
        default_sampling(EngineConfig(model="m"), loaded(**sampling))
    assert default_sampling(EngineConfig(model="m", generation_config="none"), loaded(**sampling)) == {}
