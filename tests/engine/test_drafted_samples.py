"""Several samples of one row in a step: the tokens of sampling one at a time, as far as the drafts were right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from bequest.engine.constraints.masks import MaskChannel
from bequest.engine.runner.catalogues import PlacedCatalogues
from bequest.engine.runner.sampling import RowSampler
from bequest.engine.scheduling.sampler_rows import row_spec
from bequest.engine.types import (
    NO_DRAFT,
    NO_ROW,
    MaskSpec,
    RowSpec,
    SamplingParams,
    StepBatch,
    StepRows,
    StepSamples,
    mask_words,
)
from bequest.engine.types.catalogue import Catalogue
from bequest.engine.types.encoder import TimestampRule, TokenRules

V, LENGTH = 60, 5  # tokens, samples of a row
CATALOGUE = 7  # a handle

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.4},
    "bad words": {"bad_words": ((3,), *((a, b) for a in range(0, V, 2) for b in range(V) if b % 3))},
    "held back": {"min_tokens": 3, "stop_token_ids": frozenset(range(0, V, 2))},
    "catalogue": {},
    "timestamps": {"rules": TokenRules(never=(1,), timestamps=TimestampRule(first=40, end=39))},
}


def specs(kinds: Sequence[str] = tuple(KINDS)) -> list[RowSpec]:
    """A row of each kind, twice, and in the second place one that comes back with a history."""
    made = []
    for row, kind in enumerate([*kinds] * 2):
        params = SamplingParams(max_tokens=99, **KINDS[kind])
        outputs = (2, 4) if row >= len(kinds) and kind != "catalogue" else ()
        handle = CATALOGUE if kind == "catalogue" else None
        made.append(
            row_spec(row, params, seed=row, prompt=(5, 6, 8), outputs=outputs, end_token_ids=(0,), catalogue=handle)
        )
    return made


def catalogue() -> Catalogue:
    items = [(a, b, c, d, e, 9) for a in (1, 2) for b in (3, 4) for c in (5, 6) for d in (7, 8) for e in (1, 2)]
    return Catalogue(np.asarray(items, np.int32), V)


def sampler_of(rows: list[RowSpec]) -> RowSampler:
    catalogues = PlacedCatalogues(torch.device("cpu"))
    catalogues.register(CATALOGUE, catalogue())
    sampler = RowSampler(len(rows), V, catalogues)
    sampler.update_rows(StepRows(open=tuple(rows)))
    return sampler


@dataclass(frozen=True)
class One:
    token: int
    logprobs: tuple[float, int]


class Alone:
    """Rows that are sampled one token at a time."""

    def __init__(self, rows: list[RowSpec], masks: np.ndarray | None) -> None:
        self.sampler = sampler_of(rows)
        self.masks = masks  # [rows, LENGTH, words]

    def sample(self, row: int, number: int, logits: torch.Tensor) -> One:
        channel, spec = MaskChannel(V), None
        if self.masks is not None:
            channel.open(1, 1).fill(self.masks[row, number][None])
            spec = MaskSpec(number=1, first_sample=0, num_rows=1)
        asked = StepSamples(tokens=int32(0), rows=int32(row), positions=int32(10 + number), num_logprobs=2, masks=spec)
        tokens, bad, logprobs = self.sampler.sample(logits[None], asked, channel)
        assert not bad.any() and logprobs is not None
        return One(int(tokens[0]), (float(logprobs.chosen[0]), int(logprobs.rank[0])))


def int32(*values: int) -> np.ndarray:
    return np.asarray(values, np.int32)


def last_tokens(sampler: RowSampler, num_rows: int) -> list[int]:
    zeros, rows = np.zeros(num_rows, np.int32), np.arange(num_rows, dtype=np.int32)
    batch = StepBatch(
        input_ids=zeros,
        input_rows=rows,
        positions=zeros,
        slot_mapping=zeros.astype(np.int64)[None],
        query_start=zeros,
        seq_lens=zeros,
        block_tables=zeros[None],
    )
    return sampler.resolve(batch).tolist()


@dataclass(frozen=True)
class Case:
    """Rows that are sampled up to LENGTH times in one step, in any order, behind drafts of which one may be wrong."""

    logits: torch.Tensor  # [rows, LENGTH, V]
    masks: np.ndarray | None  # [rows, LENGTH, words]
    places: list[tuple[int, int]]  # of each sample: its row, its number there
    drafts: list[list[int]]  # of each row

    @property
    def asked(self) -> StepSamples:
        order = dict.fromkeys(row for row, _ in self.places)
        return StepSamples(
            tokens=np.arange(len(self.places), dtype=np.int32),
            rows=int32(*(row for row, _ in self.places)),
            positions=int32(*(10 + i for _, i in self.places)),
            drafts=int32(*(draft for row in order for draft in self.drafts[row])),
            num_logprobs=2,
            masks=None if self.masks is None else MaskSpec(number=1, first_sample=0, num_rows=len(self.places)),
        )

    def of_samples(self, array: torch.Tensor) -> torch.Tensor:
        """[N, …] of [rows, LENGTH, …]"""
        return torch.stack([array[place] for place in self.places])


def draw_case(rows: list[RowSpec], draw: np.random.Generator, masked: bool) -> Case:
    num = len(rows)
    logits = torch.from_numpy(draw.normal(size=(num, LENGTH, V)).astype(np.float32) * 3)
    masks = None
    if masked:  # all but one token in sixteen
        masks = np.full((num, LENGTH, mask_words(V)), -1, np.int32) & ~(1 << draw.integers(10, 16, (num, LENGTH, 1)))
        masks = masks.astype(np.int32)
    whole = Alone(rows, masks)
    right = [[whole.sample(row, i, logits[row, i]).token for i in range(LENGTH - 1)] for row in range(num)]
    # The draft of sample i is what follows it; from a place on nothing was drafted, and at one it was wrong.
    counts = draw.integers(1, LENGTH + 1, num)  # samples of each row
    wrong_at = draw.integers(0, LENGTH, num)
    drafts = [
        [(right[row][i] + 1) % V if i == wrong_at[row] else right[row][i] for i in range(counts[row] - 1)] + [NO_DRAFT]
        for row in range(num)
    ]
    places = [(row, i) for row in draw.permutation(num).tolist() for i in range(counts[row])]
    return Case(logits, masks, places, drafts)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_the_tokens_of_sampling_one_at_a_time(seed: int, masked: bool) -> None:
    draw = np.random.default_rng(seed)
    rows = specs()
    case, num = draw_case(rows, draw, masked), len(rows)
    channel = MaskChannel(V)
    if case.masks is not None:
        channel.open(1, len(case.places)).fill(np.stack([case.masks[place] for place in case.places]))
    together, alone = sampler_of(rows), Alone(rows, case.masks)
    tokens, bad, logprobs = together.sample(case.of_samples(case.logits), case.asked, channel)
    assert not bad.any() and logprobs is not None
    found = {
        place: One(int(t), (float(p), int(r)))
        for place, t, p, r in zip(case.places, tokens, logprobs.chosen, logprobs.rank, strict=True)
    }
    accepted = 0
    for row in range(num):
        for i, draft in enumerate(case.drafts[row]):
            expected = alone.sample(row, i, case.logits[row, i])
            assert found[row, i] == expected
            accepted += 1
            if expected.token != draft:
                break
    assert accepted > num, "some drafts were right"
    # The samples behind a wrong draft have left nothing behind.
    assert last_tokens(together, num) == last_tokens(alone.sampler, num)
    again, further = one_of_each(num), torch.from_numpy(draw.normal(size=(num, V)).astype(np.float32))
    one, other = together.sample(further, again), alone.sampler.sample(further, again)
    assert one[0].tolist() == other[0].tolist() and one[1].tolist() == other[1].tolist()


def one_of_each(num: int) -> StepSamples:
    rows = np.arange(num, dtype=np.int32)
    return StepSamples(tokens=rows, rows=rows, positions=np.full(num, 30, np.int32))


def test_a_bad_sample_ends_its_row() -> None:
    rows = [row_spec(row, SamplingParams(max_tokens=9, temperature=0.0), seed=0) for row in range(2)]
    logits = torch.zeros(6, V)
    logits[:, 4] = 1.0
    logits[1, 0] = torch.nan
    asked = StepSamples(
        tokens=np.arange(6, dtype=np.int32),
        rows=int32(0, 0, 0, 1, 1, NO_ROW),
        positions=int32(5, 6, 7, 5, 6, 0),
        drafts=int32(4, 0, NO_DRAFT, 4, NO_DRAFT, NO_DRAFT),
    )
    tokens, bad, _ = sampler_of(rows).sample(logits, asked)
    assert tokens.tolist() == [4, 0, 0, 4, 4, 0] and bad.tolist() == [False, True, False, False, False, False]
