"""What a request leaves open is sampled as the model says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bequest.engine.config import EngineConfig
from bequest.engine.errors import ModelError
from bequest.engine.models.fields import Fields
from bequest.engine.models.generation import GenerationDefaults, generation_defaults
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


def test_fields_that_are_not_followed_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """`generate` of transformers would choose other tokens. Values that mean nothing are not worth a word."""
    neutral: dict[str, object] = {"typical_p": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": None, "num_beams": 4}
    given = {"no_repeat_ngram_size": 3, "suppress_tokens": [5], "temperature": 0.5}
    config = Fields({"architectures": ["LlamaForCausalLM"]}, "config.json")
    for values, told in ((neutral, ()), (neutral | given, ("no_repeat_ngram_size", "suppress_tokens"))):
        made = generation_defaults(Fields(values, "generation_config.json"), config)
        assert made.not_followed == told
        default_sampling(EngineConfig(model="m"), SimpleNamespace(generation=made))  # type: ignore[arg-type]
    assert "generation_config.json: not followed: no_repeat_ngram_size, suppress_tokens" in caplog.text
    assert caplog.text.count("not followed") == 1
    heard = Fields({"architectures": ["BartForConditionalGeneration"], "decoder_start_token_id": 2}, "config.json")
    assert generation_defaults(Fields({"suppress_tokens": [5]}, "generation_config.json"), heard).not_followed == ()
