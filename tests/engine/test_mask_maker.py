"""Who makes the masks of a step, and when the event loop and the device are told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from bequest.engine.constraints.grammar import Grammar, GrammarMasks, GrammarMatcher, GrammarSource
from bequest.engine.constraints.mask_maker import MaskMaker
from bequest.engine.constraints.masks import MaskChannel, StepMasks
from bequest.engine.kernels.flag import Flag
from bequest.engine.types import MaskSpec, StepPlan, StepResult, mask_words
from tests.engine.grammar_world import tokenizer, vocabulary

V = vocabulary().vocab_size


def plan_of(step: int, num_rows: int, first: int = 0) -> StepPlan:
    spec = MaskSpec(number=step, first_sample=first, num_rows=num_rows)
    return cast(StepPlan, SimpleNamespace(step=step, samples=SimpleNamespace(masks=spec, drafts=None)))


def result_of(step: int, *texts: str) -> StepResult:
    tokens = [tokenizer().encode(text, False)[0] for text in texts]
    return cast(
        StepResult,
        SimpleNamespace(step=step, tokens=np.asarray(tokens, np.int32), bad_rows=np.zeros(len(tokens), bool)),
    )


class Place:
    """Where a device takes masks from, and the flag that it waits for."""

    def __init__(self, num_rows: int) -> None:
        self.masks = np.zeros((num_rows, mask_words(V)), np.int32)
        self.word = np.zeros(1, np.uint32)
        self.flag = Flag(self.word.ctypes.data, 7)

    @property
    def told(self) -> bool:
        return int(self.word[0]) == 7

    def allows(self, row: int, text: str) -> bool:
        token = tokenizer().encode(text, False)[0]
        return bool(self.masks[row, token // 32] >> (token % 32) & 1)


@pytest.fixture
def maker() -> Iterator[tuple[MaskMaker, MaskChannel]]:
    channel = MaskChannel(V)
    made = MaskMaker(channel)
    yield made, channel
    made.stop()


def matchers_of(*patterns: str) -> list[GrammarMatcher]:
    return [Grammar(GrammarSource("regex", pattern), vocabulary()).matcher() for pattern in patterns]


def two_steps(maker: tuple[MaskMaker, MaskChannel], matchers: list[GrammarMatcher]) -> None:
    """The masks of the first are there, those of the second wait for its result."""
    made, channel = maker
    made.add(plan_of(1, len(matchers)), matchers)
    channel.of(1).wait()
    made.add(plan_of(2, len(matchers)), matchers)


def test_the_loop_is_told_before_masks_are_made_and_the_device_by_the_call_that_makes_them(
    maker: tuple[MaskMaker, MaskChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, channel = maker
    two_steps(maker, matchers_of("a(b|c)*", "x+"))
    place, events = Place(2), list[str]()
    channel.of(2).send_to(place.masks, place.flag)
    fill = GrammarMasks.fill_step

    def filling(self: GrammarMasks, *arguments: Any) -> bool:
        assert not place.told
        events.append("masks")
        is_set = fill(self, *arguments)
        assert is_set and place.told, "by the call itself, which nobody interrupts"
        return is_set

    monkeypatch.setattr(GrammarMasks, "fill_step", filling)
    monkeypatch.setattr(StepMasks, "_send", lambda self, masks: events.append("sent again"))
    made.take(result_of(1, "a", "x"), lambda: events.append("told"))
    assert events == ["told", "masks"]
    assert place.allows(0, "b") and not place.allows(0, "a") and place.allows(1, "x")
    assert channel.of(2).filled


def test_without_a_place_the_masks_are_sent_when_one_is_known(maker: tuple[MaskMaker, MaskChannel]) -> None:
    made, channel = maker
    two_steps(maker, matchers_of("ab"))
    told: list[int] = []
    made.take(result_of(1, "a"), lambda: told.append(1))
    assert told == [1] and channel.of(2).filled
    place = Place(1)
    channel.of(2).send_to(place.masks, place.flag)
    assert place.told and place.allows(0, "b")


def test_a_matcher_that_fails_is_known_before_the_device_is_told(
    maker: tuple[MaskMaker, MaskChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, channel = maker
    matchers = matchers_of("ab", "ab")
    two_steps(maker, matchers)
    place, known = Place(2), list[bool]()
    send = StepMasks._send

    def sending(self: StepMasks, masks: Any) -> None:
        known.append(matchers[1].failed is not None and not place.told)
        send(self, masks)

    monkeypatch.setattr(StepMasks, "_send", sending)
    channel.of(2).send_to(place.masks, place.flag)
    made.take(result_of(1, "a", "x"), lambda: None)
    assert known == [True] and place.told and place.allows(0, "b") and not place.masks[1].any()


def test_the_loop_does_not_wait_for_masks_of_others(
    maker: tuple[MaskMaker, MaskChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask thread is at the first masks of a step while the result of another one comes."""
    made, channel = maker
    old, new = matchers_of("ab"), matchers_of("xy")
    made.add(plan_of(1, 1), old)
    channel.of(1).wait()
    begun, goes_on = threading.Event(), threading.Event()
    fill = GrammarMasks.fill_step

    def filling(self: GrammarMasks, answers: Any, matchers: Any, *more: Any) -> bool:
        if matchers == new:
            begun.set()
            assert goes_on.wait(60)
        return fill(self, answers, matchers, *more)

    monkeypatch.setattr(GrammarMasks, "fill_step", filling)
    made.add(plan_of(2, 1), new)
    assert begun.wait(60)
    made.add(plan_of(3, 1), old)
    told = threading.Event()
    taking = threading.Thread(target=made.take, args=(result_of(1, "a"), told.set))
    taking.start()
    assert told.wait(60), "though the masks are not made"
    assert not channel.of(3).filled
    goes_on.set()
    taking.join(60)
    assert channel.of(2).filled and channel.of(3).filled


@pytest.mark.parametrize("tell", [True, False])
def test_a_result_of_a_step_without_masks_is_told_all_the_same(
    maker: tuple[MaskMaker, MaskChannel], tell: bool
) -> None:
    told: list[int] = []
    say: Callable[[], None] | None = (lambda: told.append(1)) if tell else None
    maker[0].take(result_of(5), say)
    assert told == [1] * tell
