"""From tokens to what a client is shown, with the embedded model's tokenizer."""

from __future__ import annotations

import itertools

import pytest

from engine.models.embedded import embedded_model_path
from engine.outputs import ChoiceOutput
from engine.text import load_text
from engine.text.tokenizer import Tokenizer
from engine.types import ChoiceDelta, OutputMode, SamplingParams, TokenLogprob
from tests.engine.harness import request

TEXT = "Grüße aus Köln: 🙂 und 日本語, 123."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_text(embedded_model_path()).tokenizer


def run(tokenizer: Tokenizer, text: str, mode: OutputMode = OutputMode.DELTA, **fields: object) -> list[ChoiceDelta]:
    """All deliveries of a choice whose tokens spell `text`, taken after each token, as the engine does."""
    params = SamplingParams(max_tokens=1000, **fields)  # type: ignore[arg-type]
    output = ChoiceOutput(request([1, 2], params, output=mode), 0, tokenizer)
    deltas = []
    for token in tokenizer.encode(text, add_special_tokens=False):
        logprob = TokenLogprob(token, -0.5, 1) if params.logprobs is not None else None
        stop = output.push(token, logprob, shown=True)
        if stop is not None:
            output.finish("stop", stop)
        if (delta := output.take(always=False)) is not None:
            deltas.append(delta)
        if stop is not None:
            return deltas
    output.finish("length", None)
    deltas.append(output.take(always=False))  # type: ignore[arg-type]
    return deltas


def test_deltas_join_to_the_text_and_never_split_a_character(tokenizer: Tokenizer) -> None:
    deltas = run(tokenizer, TEXT)
    assert "".join(d.text for d in deltas) == TEXT
    assert not any("\ufffd" in d.text for d in deltas)
    assert [t for d in deltas for t in d.token_ids] == tokenizer.encode(TEXT, add_special_tokens=False)
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == "length"


def test_modes_end_with_the_same(tokenizer: Tokenizer) -> None:
    cumulative = run(tokenizer, TEXT, OutputMode.CUMULATIVE)
    assert cumulative[-1].text == TEXT
    assert all(b.text.startswith(a.text) for a, b in itertools.pairwise(cumulative))
    assert run(tokenizer, TEXT, OutputMode.FINAL)[-1].token_ids == cumulative[-1].token_ids


@pytest.mark.parametrize("stop", ["Köln", ": ", "🙂", "日本", "3."])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text_and_shows_nothing_of_itself(
    tokenizer: Tokenizer, stop: str, include: bool
) -> None:
    deltas = run(tokenizer, TEXT, stop=(stop,), include_stop_str_in_output=include)
    end = TEXT.index(stop) + (len(stop) if include else 0)
    assert "".join(d.text for d in deltas) == TEXT[:end]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)
    shown = ""
    for delta in deltas:
        shown += delta.text
        assert TEXT[:end].startswith(shown)


def test_a_stop_string_within_min_tokens_does_not_count(tokenizer: Tokenizer) -> None:
    text = "one two one two one two"
    free = len(tokenizer.encode("one two one", add_special_tokens=False))
    deltas = run(tokenizer, text, stop=("two",), min_tokens=free)
    assert "".join(d.text for d in deltas) == "one two one "
    assert deltas[-1].stop_reason == "two"


def test_held_back_text_is_shown_when_no_stop_comes(tokenizer: Tokenizer) -> None:
    assert "".join(d.text for d in run(tokenizer, "a b c END", stop=("ENDING",))) == "a b c END"


def test_logprobs_are_one_per_token_and_sum_up(tokenizer: Tokenizer) -> None:
    deltas = run(tokenizer, TEXT, logprobs=0)
    assert all(len(d.logprobs or ()) == len(d.token_ids) for d in deltas)
    count = sum(len(d.token_ids) for d in deltas)
    assert deltas[-1].cumulative_logprob == pytest.approx(-0.5 * count)
