"""The rule of timestamps against one that looks at one row and one token at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from bequest.engine.runner.timestamps import TimestampRows
from bequest.engine.scheduling.sampler_rows import row_spec
from bequest.engine.types import RowSpec, SamplingParams, StepRows
from bequest.engine.types.encoder import TimestampRule, TokenRules

TEXT, END, NO_TIMES, FIRST, VOCAB = 10, 10, 14, 15, 140
NEVER = (3, 11, 12)
RULES = TokenRules(never=NEVER, timestamps=TimestampRule(FIRST, END))


def slowly(logits: np.ndarray, said: list[int]) -> np.ndarray:
    """As OpenAI's own program has it, after the tokens that never come."""
    logits = logits.copy()
    logits[NO_TIMES] = -math.inf
    last_is_time = bool(said) and said[-1] >= FIRST
    before_is_time = len(said) < 2 or said[-2] >= FIRST
    if last_is_time and before_is_time:
        logits[FIRST:] = -math.inf
    elif last_is_time:
        logits[:END] = -math.inf
    if times := [token for token in said if token >= FIRST]:
        logits[FIRST : times[-1] if last_is_time and not before_is_time else times[-1] + 1] = -math.inf
    if not said:
        logits[:FIRST] = -math.inf
        logits[FIRST + 51 :] = -math.inf
    likely = logits.copy()
    likely[list(NEVER)] = -math.inf
    with np.errstate(divide="ignore"):
        together = np.log(np.exp(likely[FIRST:]).sum())
    if together > likely[:FIRST].max():
        logits[:FIRST] = -math.inf
    return logits


def spec(row: int, rules: TokenRules | None, said: tuple[int, ...] = ()) -> RowSpec:
    return row_spec(row, SamplingParams(max_tokens=9, rules=rules), seed=0, outputs=said)


@pytest.mark.parametrize("level", [-3.0, 0.0, 3.0])
def test_rows_follow_the_rule(level: float) -> None:
    rng = np.random.default_rng(7)
    rows = TimestampRows(6, VOCAB, torch.device("cpu"))
    assert not rows.any
    said: dict[int, list[int]] = {4: [], 1: [FIRST, 2, FIRST + 9], 5: [FIRST, 2, 2]}
    specs = (spec(row, RULES, tuple(tokens)) for row, tokens in said.items())
    rows.update_rows(StepRows(open=(spec(0, None), *specs)))
    assert rows.any
    order = torch.tensor([4, -1, 0, 1, 5], dtype=torch.int32)
    for _ in range(40):
        logits = rng.normal(size=(5, VOCAB)).astype(np.float32)
        logits[:, FIRST:] += level
        given = torch.from_numpy(logits.copy())
        masked = rows.masked(given, order).numpy()
        np.testing.assert_array_equal(given.numpy(), logits)
        np.testing.assert_array_equal(masked[1:3], logits[1:3])
        tokens = [0, 0, 0, 0, 0]
        for place, row in ((0, 4), (3, 1), (4, 5)):
            expected = slowly(logits[place], said[row])
            np.testing.assert_array_equal(masked[place], expected)
            expected[list(NEVER)] = -math.inf
            tokens[place] = int(expected.argmax())
            said[row].append(tokens[place])
        rows.record(order, torch.tensor(tokens, dtype=torch.int32))


def test_closed_rows_are_free_of_it() -> None:
    rows = TimestampRows(2, VOCAB, torch.device("cpu"))
    rows.update_rows(StepRows(open=(spec(1, RULES),)))
    rows.record(torch.tensor([1]), torch.tensor([FIRST]))
    rows.update_rows(StepRows(close=(1,), open=(spec(1, TokenRules(never=NEVER)),)))
    assert not rows.any
    logits = torch.zeros(1, VOCAB)
    assert torch.equal(rows.masked(logits, torch.tensor([1])), logits)
    rows.update_rows(StepRows(close=(1,), open=(spec(1, RULES),)))
    assert rows.masked(logits, torch.tensor([1]))[0, :FIRST].eq(-math.inf).all()


@pytest.mark.parametrize("seed", range(8))
def test_runs_behind_drafts_are_as_one_token_at_a_time(seed: int) -> None:
    """Rows that are sampled several times in a step, of whose drafts one may be wrong, and padding behind them."""
    draw = np.random.default_rng(seed)
    said = {0: (), 2: (FIRST, 2, FIRST + 9), 3: (FIRST, 2, 2), 5: (FIRST + 3,)}
    together, alone = (TimestampRows(6, VOCAB, torch.device("cpu")) for _ in range(2))
    for one_of_both in (together, alone):
        one_of_both.update_rows(StepRows(open=tuple(spec(row, RULES, tokens) for row, tokens in said.items())))
    for _ in range(6):
        order: list[int] = []
        drafts: list[int] = []
        tokens: list[int] = []
        expected: dict[int, np.ndarray] = {}
        lengths = draw.integers(1, 6, len(said))
        logits = torch.from_numpy(draw.normal(size=(int(lengths.sum()) + 2, VOCAB)).astype(np.float32))
        logits[:, FIRST:] += 2 * draw.normal()
        for row, length in zip(draw.permutation([*said]).tolist(), lengths.tolist(), strict=True):
            wrong, place, one = int(draw.integers(0, length + 1)), len(order), torch.tensor([row])
            for number in range(length):
                order.append(row)
                drafts.append(-1 if number == length - 1 else int(draw.integers(0, VOCAB)))
                tokens.append(0)
                if number > wrong:
                    continue
                masked = alone.masked(logits[place + number : place + number + 1], one)
                expected[place + number] = masked[0].numpy()
                tokens[-1] = int(masked[0].argmax())
                alone.record(one, torch.tensor([tokens[-1]]))
                if number < min(wrong, length - 1):
                    drafts[-1] = tokens[-1]
                elif number < length - 1:
                    drafts[-1] = tokens[-1] ^ 1
        rows = torch.tensor([*order, -1, -1], dtype=torch.int32)
        drafted = torch.tensor([*drafts, 5, 7], dtype=torch.int32)
        masked = together.masked(logits, rows, drafted)
        for place, wanted in expected.items():
            np.testing.assert_array_equal(masked[place].numpy(), wanted)
        together.record(rows, torch.tensor([*tokens, 0, 0], dtype=torch.int32), drafted)
        assert torch.equal(together._state[:, :-1], alone._state[:, :-1])
