"""From tokens to what a client is shown, with the embedded model's tokenizer."""

from __future__ import annotations

import itertools
import json

import pytest

from bequest.engine._C import Progress
from bequest.engine.models.embedded import embedded_model_path
from bequest.engine.outputs import ChoiceOutput
from bequest.engine.text import load_text
from bequest.engine.text.outlets import Outlet, outlet_of, pass_on, quoted_texts
from bequest.engine.text.tokenizer import Tokenizer
from bequest.engine.types import ChoiceDelta, OutputMode, SamplingParams, TokenLogprob
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


# --- how many tokens the text that was shown is made of ---------------------------------------------------------------


def shown_tokens(tokenizer: Tokenizer, tokens: list[int], text: str) -> int:
    """The slow and obvious way: tokens from the first on, as long as their bytes are the beginning of the text."""
    data = text.encode()
    count, length = 0, 0
    for token in tokens:
        length += len(tokenizer.token_bytes(token))
        if length > len(data):
            break
        count += 1
    return count


def feed(output: ChoiceOutput, tokens: list[int]) -> tuple[int, str]:
    """Pushes tokens until a stop string is complete; how many were taken, and the text that was shown."""
    text = ""
    for count, token in enumerate(tokens, 1):
        stop = output.push(token, None, shown=True)
        if stop is not None:
            output.finish("stop", stop)
        delta = output.take(always=False)
        text += "" if delta is None else delta.text
        if stop is not None:
            return count, text
    return len(tokens), text


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_shown_len_for_every_stop_string_of_a_text(tokenizer: Tokenizer, length: int, include: bool) -> None:
    """Inside tokens, across them, at their ends, and in the middle of characters that several tokens spell."""
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    assert any(not tokenizer.token_bytes(t).isascii() for t in tokens) and len(tokens) > 15
    for start in range(len(TEXT) - length + 1):
        stop = TEXT[start : start + length]
        params = SamplingParams(max_tokens=1000, stop=(stop,), include_stop_str_in_output=include)
        output = ChoiceOutput(request([1, 2], params), 0, tokenizer)
        taken, text = feed(output, tokens)
        end = TEXT.index(stop)
        assert text == TEXT[: end + (length if include else 0)]
        assert output.shown_len == shown_tokens(tokenizer, tokens[:taken], text), stop


def test_shown_len_without_a_stop_is_every_token_but_the_end(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    for stops in ((), ("never there",)):
        output = ChoiceOutput(request([1, 2], SamplingParams(max_tokens=1000, stop=stops)), 0, tokenizer)
        assert output.shown_len == 0
        feed(output, tokens)
        assert output.shown_len == len(tokens)
        output.push(2, None, shown=False)
        output.finish("stop", None)
        assert output.shown_len == len(tokens)


@pytest.mark.parametrize(
    "include, skip, shown", [(False, False, ()), (True, False, ("word", "special")), (True, True, ("word",))]
)
def test_an_end_that_has_no_text_is_not_shown(
    tokenizer: Tokenizer, include: bool, skip: bool, shown: tuple[str, ...]
) -> None:
    """Who asks for stop strings in the text continues behind the text, too, and not behind a hidden end token."""
    params = SamplingParams(max_tokens=9, include_stop_str_in_output=include, skip_special_tokens=skip)
    output = ChoiceOutput(request([1, 2], params), 0, tokenizer)
    [word, *_] = tokenizer.encode("a", add_special_tokens=False)
    ends = {"word": word, "special": min(tokenizer.special_ids)}
    assert tuple(name for name, token in ends.items() if output.shows_end(token)) == shown


def test_shown_len_of_a_text_that_is_all_stop_string_is_0(tokenizer: Tokenizer) -> None:
    for text in ("STOP", "🙂"):
        output = ChoiceOutput(request([1, 2], SamplingParams(max_tokens=1000, stop=(text,))), 0, tokenizer)
        feed(output, tokenizer.encode(text, add_special_tokens=False))
        assert output.finish_reason == "stop" and output.shown_len == 0


def test_what_was_held_back_counts_when_the_text_ends(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a b END", add_special_tokens=False)
    output = ChoiceOutput(request([1, 2], SamplingParams(max_tokens=1000, stop=("ENDING",))), 0, tokenizer)
    _, text = feed(output, tokens)
    output.finish("length", None)
    assert not text.endswith("END") and output.shown_len == len(tokens)


def test_an_incomplete_character_before_a_stop_string_is_not_shown(tokenizer: Tokenizer) -> None:
    """The first bytes of a character, then something else: the bytes never become text of their own."""
    begun = tokenizer.encode("a🙂", add_special_tokens=False)[:-1]
    tokens = [*begun, *tokenizer.encode("STOP", add_special_tokens=False)]
    output = ChoiceOutput(request([1, 2], SamplingParams(max_tokens=1000, stop=("STOP",))), 0, tokenizer)
    taken, text = feed(output, tokens)
    assert taken == len(tokens) and text.startswith("a")
    assert output.shown_len <= len(begun)


class Wire:
    """A transport and its protocol."""

    writing_paused = False

    def __init__(self) -> None:
        self.data = b""

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.data += data


def through(outlet: Outlet) -> Progress:
    """A sequence whose tokens go there."""
    progress = Progress()
    progress.outlet = outlet
    return progress


@pytest.mark.parametrize("fields", [{}, {"skip_special_tokens": False}])
def test_tokens_that_are_nothing_but_their_text_pass_an_outlet(tokenizer: Tokenizer, fields: dict[str, bool]) -> None:
    """Special tokens and those that spell parts of characters do not, nor those behind a part."""
    texts, wire, outlet = quoted_texts(tokenizer), Wire(), Outlet(b"", b",")
    assert texts is not None
    outlet.open(wire, wire, False)
    special = min(tokenizer.special_ids)
    tokens = [*tokenizer.encode(TEXT, add_special_tokens=False), special]
    tokens += [*tokens, tokenizer.encode("🙂", add_special_tokens=False)[0], *tokens]
    params = SamplingParams(max_tokens=1000, **fields)  # type: ignore[arg-type]
    output = ChoiceOutput(request([1, 2], params, output=OutputMode.DELTA), 0, tokenizer, outlet)
    alone = ChoiceOutput(request([1, 2], params, output=OutputMode.DELTA), 0, tokenizer)
    heard, num_pushed = "", 0
    for token in tokens:
        alone.push(token, None, shown=True)
        expected = alone.take(always=False)
        assert expected is not None
        if output.outlet is None or pass_on(texts, [through(output.outlet)], [token]):
            num_pushed += 1
            output.push(token, None, shown=True)
            assert output.take(always=False) == expected
        else:
            assert json.loads(wire.data[:-1]) == expected.text
            wire.data = b""
        heard += expected.text
    assert heard.replace(tokenizer.token_text(special), "").startswith(TEXT)
    assert outlet.num_written > len(tokens) // 2 and num_pushed > 9
    assert output.shown_len == alone.shown_len == len(tokens)


@pytest.mark.parametrize("fields", [{"stop": ("x",)}, {"logprobs": 1}, {"n": 2}])
def test_what_is_more_than_text_passes_no_outlet(tokenizer: Tokenizer, fields: dict[str, object]) -> None:
    params = SamplingParams(max_tokens=1000, **fields)  # type: ignore[arg-type]
    output = ChoiceOutput(request([1, 2], params, output=OutputMode.DELTA), 0, tokenizer, Outlet(b"", b""))
    for token in tokenizer.encode("plain words", add_special_tokens=False):
        output.push(token, TokenLogprob(token, -0.5, 1), shown=True)
        output.take(always=False)
        assert output.outlet is None


def test_a_plain_function_has_no_outlet() -> None:
    assert outlet_of(lambda delta: None) is None
