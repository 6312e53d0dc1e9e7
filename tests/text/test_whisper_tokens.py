"""Whisper's control tokens, and what its timestamps cut a window into."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bequest.engine.text.languages import LANGUAGES, language_code, language_name
from bequest.engine.text.whisper_segments import split_window
from bequest.engine.text.whisper_tokens import whisper_tokens
from tests.server.fake_whisper import DE, END, ENGLISH, MULTILINGUAL, NO_TIMES, PREVIOUS, START, TIMES, TRANSLATE
from tests.server.fake_whisper import WhisperTokenizer as Fake
from tests.server.fakes import ByteTokenizer

TOKENS = whisper_tokens(Fake(), ENGLISH)
assert TOKENS is not None


def timed(*parts: str | float) -> list[int]:
    return [i for part in parts for i in (part.encode() if isinstance(part, str) else [TIMES + round(part * 50)])]


def test_prompts() -> None:
    multilingual = whisper_tokens(Fake(), MULTILINGUAL)
    assert multilingual is not None and multilingual.multilingual and not TOKENS.multilingual
    assert TOKENS.prompt("transcribe", "en") == (START,)
    assert TOKENS.prompt("transcribe", "en", timestamps=False) == (START, NO_TIMES)
    assert multilingual.prompt("translate", "de", (1, 2)) == (PREVIOUS, 1, 2, START, DE, TRANSLATE)
    assert TOKENS.seconds(TIMES) == 0.0 and TOKENS.seconds(TIMES + 1500) == pytest.approx(30.0)
    assert TOKENS.seconds(TIMES - 1) is None


def test_other_tokenizers_have_none() -> None:
    class Plain(ByteTokenizer):
        def id_of(self, token: str) -> int | None:
            return None

    assert whisper_tokens(Plain(), ENGLISH) is None


@pytest.mark.parametrize(
    ("said", "seconds", "segments", "advance"),
    [
        ((0.0, "a"), 30, [(0, 30, "a")], 30),
        ((0.0, "a", 5.0), 30, [(0, 5, "a")], 30),
        ((0.0, "a", 5.0, 6.0, "b", 9.0), 30, [(0, 5, "a"), (6, 9, "b")], 30),
        ((0.0, "a", 5.0, 6.0, "b"), 30, [(0, 5, "a")], 5),
        ((0.0, "a", 5.0, 5.0), 30, [(0, 5, "a")], 5),
        ((0.0, "a", 5.0, 6.0, "b", 9.0), 7, [(0, 5, "a"), (6, 7, "b")], 7),
        ((0.0, 2.0, "a", 5.0), 30, [(2, 5, "a")], 30),
        ((0.0, "a", 9.0, 3.0, "b", 4.0), 30, [(0, 9, "a"), (9, 9, "b")], 30),
        ((0.0, 0.0, "a"), 30, [], 30),
        ((0.0,), 30, [], 30),
        ((), 30, [], 30),
        (("a",), 4, [(0, 4, "a")], 4),
    ],
)
def test_windows(
    said: tuple[str | float, ...], seconds: float, segments: list[tuple[float, float, str]], advance: float
) -> None:
    cut = split_window(TOKENS, timed(*said), seconds)
    found = [(s.start, s.end, bytes(i for i in s.token_ids if i < END).decode()) for s in cut.segments]
    assert found == [(pytest.approx(start), pytest.approx(end), text) for start, end, text in segments]
    assert cut.advance == pytest.approx(advance)


@given(
    st.lists(st.integers(0, 30) | st.integers(TIMES, TIMES + 1500), max_size=30),
    st.floats(0.0001, 30),
)
def test_whatever_it_says_time_goes_on(token_ids: list[int], seconds: float) -> None:
    cut = split_window(TOKENS, token_ids, seconds)
    assert 0 < cut.advance <= seconds
    times = [time for segment in cut.segments for time in (segment.start, segment.end)]
    assert times == sorted(times) and all(0 <= time <= seconds for time in times)


def test_languages() -> None:
    assert language_code(" German ") == "de" and language_code("DE") == "de" and language_code("xx") == "xx"
    assert language_name("yue") == "cantonese" and language_name("xx") == "xx"
    assert len(LANGUAGES) == 100
