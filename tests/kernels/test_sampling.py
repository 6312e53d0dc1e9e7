"""The sampler against the reference, feature by feature and mixed; the draw's distribution; bad rows."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from bequest.engine import _C
from bequest.engine.kernels import cpu as kernels
from bequest.engine.scheduling.sampler_rows import row_spec
from bequest.engine.types import NO_ROW, RowSpec, SamplingParams
from tests.kernels.sampling_reference import ReferenceRow, gumbel

V = 1000


def spec(
    row: int = 0, *, seed: int = 7, choice: int = 0, prompt: tuple[int, ...] = (1, 2, 3), **fields: Any
) -> RowSpec:
    outputs = fields.pop("outputs", ())
    eos = fields.pop("eos", ())
    params = SamplingParams(max_tokens=1000, **fields)
    return row_spec(row, params, seed=seed, choice=choice, prompt=prompt, outputs=outputs, end_token_ids=eos)


def make_logits(num: int, vocab: int = V, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(num, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def sample_one(sampler: kernels.Sampler, logits: torch.Tensor, position: int, row: int = 0) -> int:
    """One token of one row, which must be good. logits [V]"""
    tokens, bad = sampler.sample(logits[None], int32(row), int32(position))
    assert not bad[0]
    return int(tokens[0])


FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, almost": {"temperature": 9e-6},
    "temperature 1": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 5.0},
    "top_k 1": {"top_k": 1},
    "top_k 2": {"top_k": 2},
    "top_k 50": {"top_k": 50},
    "top_k 300": {"top_k": 300, "temperature": 3.0},
    "top_k V": {"top_k": V},
    "top_k beyond V": {"top_k": V + 1},
    "top_p tiny": {"top_p": 1e-6},
    "top_p half": {"top_p": 0.5},
    "top_p": {"top_p": 0.9, "temperature": 2.0},
    "top_p almost 1": {"top_p": 0.9999, "temperature": 4.0},
    "min_p": {"min_p": 0.1},
    "min_p 1": {"min_p": 1.0},
    "all filters": {"min_p": 0.01, "top_k": 40, "top_p": 0.8, "temperature": 1.5},
    "min_p and top_p": {"min_p": 0.05, "top_p": 0.7, "temperature": 2.0},
    "presence": {"presence_penalty": 2.0, "top_k": 3},
    "frequency": {"frequency_penalty": 0.7, "top_k": 3},
    "negative frequency": {"frequency_penalty": -0.7},
    "repetition": {"repetition_penalty": 1.8, "temperature": 0.0, "prompt": tuple(range(0, V, 3))},
    "repetition below 1": {"repetition_penalty": 0.7, "prompt": (5, 5, 6)},
    "all penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3, "top_k": 5},
    "bias": {"logit_bias": ((17, 8.0), (18, 7.5), (900, -100.0)), "top_k": 20},
    "allowed": {"allowed_token_ids": (3, 999, 500)},
    "allowed, greedy": {"allowed_token_ids": (3, 999, 500), "temperature": 0.0},
    "bad words": {"bad_words": ((4,), (3, 5), (1, 2, 3, 6)), "allowed_token_ids": (3, 4, 5, 6, 7)},
    "held back": {
        "min_tokens": 4,
        "eos": (10, 11),
        "stop_token_ids": frozenset({12}),
        "logit_bias": ((10, 30.0), (12, 31.0)),
    },
    "came back": {"outputs": (8, 9, 8), "frequency_penalty": 1.0, "top_k": 10, "min_tokens": 5, "eos": (3,)},
    "choice": {"choice": 3},
    "wide seed": {"seed": 2**64 - 1},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature: str) -> None:
    """Eight steps, so that histories matter; the reference decides from the same logits."""
    row = spec(**FEATURES[feature])
    sampler, reference = kernels.Sampler(2, V), ReferenceRow(row)
    sampler.open_row(row)
    for position in range(20, 28):
        logits = make_logits(1, seed=position % 3)[0]
        assert sample_one(sampler, logits, position) == reference.sample(logits.numpy(), position)


@pytest.mark.parametrize("vocab", [1, 2, 3, 15, 16, 17, 63, 64, 65, 255, 4099])
def test_vocabulary_sizes(vocab: int) -> None:
    for fields in ({"temperature": 0.0}, {}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.2}):
        row = spec(prompt=(0,), **fields)
        sampler, reference = kernels.Sampler(1, vocab), ReferenceRow(row)
        sampler.open_row(row)
        for position in range(4):
            logits = make_logits(1, vocab, seed=position)[0]
            assert sample_one(sampler, logits, position) == reference.sample(logits.numpy(), position)


def test_random_parameters() -> None:
    chance = random.Random(5)
    for _ in range(60):
        fields: dict[str, Any] = {
            "temperature": chance.choice([0.0, 0.5, 1.0, 2.0]),
            "top_k": chance.choice([0, 0, 5, 40]),
            "top_p": chance.choice([1.0, 0.95, 0.6]),
            "min_p": chance.choice([0.0, 0.03]),
            "presence_penalty": chance.choice([0.0, 1.5]),
            "frequency_penalty": chance.choice([0.0, 0.8]),
            "repetition_penalty": chance.choice([1.0, 1.2]),
        }
        row = spec(seed=chance.getrandbits(64), **fields)
        sampler, reference = kernels.Sampler(1, V), ReferenceRow(row)
        sampler.open_row(row)
        for position in range(3):
            logits = make_logits(1, seed=chance.getrandbits(20))[0]
            assert sample_one(sampler, logits, position) == reference.sample(logits.numpy(), position)


@pytest.mark.parametrize(
    "fields", [{}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.0}, {"top_k": 30, "top_p": 0.5}]
)
def test_equal_logits_go_by_id(fields: dict[str, Any]) -> None:
    row = spec(**fields)
    sampler, reference = kernels.Sampler(1, V), ReferenceRow(row)
    sampler.open_row(row)
    for position in range(12):
        # In the reference the draw sees every token; which of the equal ones are kept is decided by id.
        logits = torch.zeros(V)
        assert sample_one(sampler, logits, position) == reference.sample(logits.numpy(), position)


def test_philox_known_answers() -> None:
    """The vectors published with the algorithm (Random123, kat_vectors)."""
    assert _C.philox4x32([0] * 4, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 2**32 - 1
    assert _C.philox4x32([ones] * 4, 2**64 - 1) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    counter = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    key = 0x299F31D0_A4093822
    assert _C.philox4x32(counter, key) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("varied", ["position", "seed", "choice"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_draws_follow_the_softmax(varied: str, temperature: float) -> None:
    """Chi-square over 20,000 draws with fixed seeds: 15 degrees of freedom, far beyond the 99.99 % quantile of 44."""
    draws, vocab = 20_000, 16
    logits = make_logits(1, vocab, seed=3, spread=1.0)
    per_call = 500
    sampler = kernels.Sampler(per_call, vocab)
    counts = np.zeros(vocab)
    for call in range(draws // per_call):
        ids = range(call * per_call, (call + 1) * per_call)
        for row, i in enumerate(ids):
            seed, choice = (i if varied == "seed" else 1), (i if varied == "choice" else 0)
            sampler.open_row(spec(row, seed=seed, choice=choice, temperature=temperature, prompt=(0,)))
        positions = np.array([i if varied == "position" else 9 for i in ids], np.int32)
        tokens, _ = sampler.sample(logits.expand(per_call, -1), np.arange(per_call, dtype=np.int32), positions)
        counts += np.bincount(tokens, minlength=vocab)
        for row in range(per_call):
            sampler.close_row(row)
    expected = torch.softmax(logits[0].double() / temperature, 0).numpy() * draws
    assert ((counts - expected) ** 2 / expected).sum() < 44
    wrong = torch.softmax(logits[0].double() / temperature * 1.2, 0).numpy() * draws
    assert ((counts - wrong) ** 2 / wrong).sum() > 44, "the test could not tell"


def test_noise_is_finely_resolved_in_the_tail() -> None:
    """Among 50,000 equal tokens the winner has a noise near log(50000): the largest noise must not be clipped."""
    noises = sorted(gumbel(3, 0, 0, v) for v in range(50_000))
    assert 8 < noises[-1] < 20 and len(set(noises[-100:])) == 100
    sampler = kernels.Sampler(1, 50_000)
    sampler.open_row(spec(seed=3))
    assert gumbel(3, 0, 0, sample_one(sampler, torch.zeros(50_000), 0)) == noises[-1]


def mixed_specs(num: int) -> list[RowSpec]:
    fields = list(FEATURES.values())
    return [spec(i, **({"seed": 100 + i} | fields[i % len(fields)])) for i in range(num)]


@pytest.mark.parametrize("threads", [1, 2])
def test_batch_and_threads_do_not_matter(threads: int) -> None:
    num = 64
    specs, logits = mixed_specs(num), make_logits(num)
    _C.set_num_threads(threads)
    try:
        crowd = kernels.Sampler(num, V)
        for row in specs:
            crowd.open_row(row)
        order = np.random.default_rng(1).permutation(num).astype(np.int32)
        for position in range(5):
            together, bad = crowd.sample(logits[order], order, np.full(num, position, np.int32))
            assert not bad.any()
            for row, token in zip(order, together, strict=True):
                if position == 0:
                    alone = kernels.Sampler(num, V)
                    alone.open_row(specs[row])
                    assert sample_one(alone, logits[row], position, row) == token
        last = crowd.resolve(np.zeros_like(order), order)
        assert (last == together).all()
    finally:
        _C.set_num_threads(1)


def test_logits_are_not_changed() -> None:
    specs, logits = mixed_specs(40), make_logits(40)
    before = logits.clone()
    sampler = kernels.Sampler(40, V)
    for row in specs:
        sampler.open_row(row)
    sampler.sample(logits, np.arange(40, dtype=np.int32), np.zeros(40, np.int32))
    assert torch.equal(logits, before)


def test_rows_of_a_wider_matrix() -> None:
    wide = torch.full((3, V + 24), float("nan"))
    wide[:, :V] = make_logits(3)
    results = []
    for logits in (wide[:, :V], wide[:, :V].contiguous()):
        sampler = kernels.Sampler(3, V)
        for row in range(3):
            sampler.open_row(spec(row))
        results.append(sampler.sample(logits, int32(0, 1, 2), int32(4, 5, 6))[0].tolist())
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0.0}, {"top_k": 4}, {"top_p": 0.5}, {"logit_bias": ((1, 1.0),)}]
)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, 500, V - 1])
def test_broken_logits_make_a_bad_row_and_touch_nobody_else(fields: dict[str, Any], poison: float, at: int) -> None:
    logits = make_logits(3)
    good = kernels.Sampler(3, V)
    sampler = kernels.Sampler(3, V)
    for row in range(3):
        good.open_row(spec(row, **fields))
        sampler.open_row(spec(row, **fields))
    expected, _ = good.sample(logits, int32(0, 1, 2), int32(5, 5, 5))
    logits[1, at] = poison
    tokens, bad = sampler.sample(logits, int32(0, 1, 2), int32(5, 5, 5))
    assert bad.tolist() == [False, True, False] and tokens.tolist() == [expected[0], 0, expected[2]]
    assert sampler.resolve(int32(0), int32(1)).tolist() == [0], "a step launched behind a bad one needs some input"


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": ()},
        {"allowed_token_ids": (4,), "bad_words": ((4,),)},
        {"allowed_token_ids": (4,), "min_tokens": 1, "eos": (4,), "temperature": 0.0},
    ],
)
def test_nothing_left_to_sample_is_a_bad_row(fields: dict[str, Any]) -> None:
    sampler = kernels.Sampler(1, V)
    sampler.open_row(spec(**fields))
    tokens, bad = sampler.sample(make_logits(1), int32(0), int32(0))
    assert bad[0] and tokens[0] == 0


def test_masked_tokens_in_the_logits_are_never_drawn() -> None:
    logits = torch.full((V,), float("-inf"))
    logits[[7, 70, 700]] = torch.tensor([0.0, 0.1, -0.1])
    for fields in ({"temperature": 100.0}, {"top_k": 50}, {"top_p": 0.999}, {"min_p": 0.001}):
        sampler = kernels.Sampler(1, V)
        sampler.open_row(spec(**fields))
        seen = {sample_one(sampler, logits, position) for position in range(50)}
        assert seen == {7, 70, 700}


def test_resolve() -> None:
    sampler = kernels.Sampler(3, V)
    sampler.open_row(spec(0, outputs=(9, 8)))
    sampler.open_row(spec(2, temperature=0.0))
    with pytest.raises(_C.Error, match="row 2 has no last token"):
        sampler.resolve(int32(5, 0), int32(NO_ROW, 2))
    token = sample_one(sampler, make_logits(1)[0], 0, row=2)
    ids = int32(5, 0, 0, 0)
    assert sampler.resolve(ids, int32(NO_ROW, 2, NO_ROW, 0)).tolist() == [5, token, 0, 8]
    assert ids.tolist() == [5, 0, 0, 0]


def test_misuse_is_an_error() -> None:
    sampler = kernels.Sampler(2, V)
    logits = make_logits(2)
    with pytest.raises(_C.Error, match="not open"):
        sampler.close_row(0)
    sampler.open_row(spec(0))
    with pytest.raises(_C.Error, match="is open"):
        sampler.open_row(spec(0))
    with pytest.raises(_C.Error, match="out of range"):
        sampler.open_row(spec(2))
    for fields in (
        {"prompt": (V,)},
        {"outputs": (-1,)},
        {"logit_bias": ((V, 1.0),)},
        {"bad_words": ((1, V),)},
        {"bad_words": ((),)},
    ):
        with pytest.raises(_C.Error, match=r"vocabulary|empty"):
            sampler.open_row(spec(1, **fields))
    with pytest.raises(_C.Error, match="not open"):
        sampler.sample(logits, int32(0, 1), int32(0, 0))
    with pytest.raises(_C.Error, match="twice"):
        sampler.sample(logits, int32(0, 0), int32(0, 0))
    sampler.close_row(0)
    sampler.open_row(spec(0, temperature=0.0))
    assert sample_one(sampler, logits[0], 3) == int(logits[0].argmax())


def test_no_rows() -> None:
    tokens, bad = kernels.Sampler(1, V).sample(torch.empty(0, V), int32(), int32())
    assert tokens.shape == bad.shape == (0,)


def test_a_guess_is_what_would_be_sampled_and_leaves_nothing_behind() -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "repetition_penalty": 1.5},
        {"top_p": 0.9, "frequency_penalty": 0.7},
        {"top_k": 20, "bad_words": ((3,), (4, 5))},
    ]
    guessing, plain = (kernels.Sampler(len(kinds), V) for _ in range(2))
    for row, fields in enumerate(kinds):
        guessing.open_row(spec(row, **fields))
        plain.open_row(spec(row, **fields))
    rows = np.arange(len(kinds), dtype=np.int32)
    for step in range(5):
        logits, positions = make_logits(len(kinds), seed=step), np.full(len(kinds), 20 + step, np.int32)
        guesses = guessing.guess(logits, rows, positions)
        assert guesses.tolist() == guessing.guess(logits, rows, positions).tolist()
        tokens, _ = guessing.sample(logits, rows, positions)
        assert guesses.tolist() == tokens.tolist() == plain.sample(logits, rows, positions)[0].tolist()
    with pytest.raises(_C.Error):
        guessing.guess(logits, int32(0, 1, 9), positions)
