from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bequest.engine.text import StopMatcher

# Few letters, so that stop strings overlap each other and themselves.
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4).map(tuple)
PIECES = st.lists(st.text(alphabet="abc", max_size=6), max_size=12)


def naive(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first, the longest of those that end there."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def run(matcher: StopMatcher, pieces: list[str]) -> tuple[list[str], str | None]:
    shown: list[str] = []
    for piece in pieces:
        text, stop = matcher.feed(piece)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, matcher.flush()], None


@given(STOPS, PIECES, st.booleans())
@example(("abcd", "bc"), ["ab", "c", "d"], False)
def test_equals_a_search_of_the_whole_text(stops: tuple[str, ...], pieces: list[str], include: bool) -> None:
    text, stop = naive("".join(pieces), stops)
    shown, found = run(StopMatcher(stops, include), pieces)
    assert found == stop
    assert "".join(shown) == text + (stop if stop and include else "")


@given(STOPS, PIECES)
def test_nothing_is_held_longer_than_needed(stops: tuple[str, ...], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = shown = ""
    for piece in pieces:
        text, stop = matcher.feed(piece)
        if stop is not None:
            return
        seen, shown = seen + piece, shown + text
        held = seen.removeprefix(shown)
        # What is held could still become a stop string, and nothing longer could.
        assert held == "" or any(stop.startswith(held) for stop in stops)
        assert not any(stop.startswith(seen[i:]) for i in range(len(shown)) for stop in stops)


def test_no_stop_strings_hold_nothing() -> None:
    matcher = StopMatcher(())
    assert matcher.feed("anything") == ("anything", None)
    assert matcher.flush() == ""


def test_the_stop_string_and_what_follows_it_are_dropped() -> None:
    assert StopMatcher(("END",)).feed("text END more") == ("text ", "END")
    assert StopMatcher(("END",), include_stop=True).feed("text END more") == ("text END", "END")


def test_a_false_start_is_given_back() -> None:
    matcher = StopMatcher(("\n\nUser:",))
    assert matcher.feed("a\n") == ("a", None)
    assert matcher.feed("\nUse") == ("", None)
    assert matcher.feed("ful") == ("\n\nUseful", None)
    assert matcher.feed("\n") == ("", None)
    assert matcher.flush() == "\n"


def test_unarmed_text_passes_unsearched() -> None:
    matcher = StopMatcher(("END",))
    assert matcher.feed("END", armed=False) == ("END", None)
    assert matcher.feed("EN", armed=False) == ("EN", None)
    assert matcher.feed("D") == ("D", None)
    assert matcher.feed("END") == ("", "END")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(("a", ""))


def test_a_long_stop_string_takes_each_character_once() -> None:
    # Quadratic work would need 10^10 comparisons here.
    matcher = StopMatcher(("a" * 100_000 + "b",))
    text = "".join(matcher.feed("a" * 1000)[0] for _ in range(200)) + matcher.flush()
    assert text == "a" * 200_000


def test_choices_share_what_is_made_of_their_stop_strings() -> None:
    """It may be large."""
    first, second = StopMatcher(["ab", "c"]), StopMatcher(("ab", "c"), include_stop=True)
    assert first._automaton is second._automaton
    assert first.feed("xa") == ("x", None) and second.feed("b") == ("b", None), "their texts are their own"
