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
