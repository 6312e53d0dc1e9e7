"""The device's sampler against the CPU's on the same logits: equal tokens, or equal scores up to rounding."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels import cpu as kernels
from bequest.engine.kernels import cuda as ops
from bequest.engine.kernels.cuda_sampler import NOT_TOLD, CudaSampler
from bequest.engine.scheduling.sampler_rows import row_spec
from bequest.engine.types import NO_ROW, RowSpec, SamplingParams
from tests.kernels.sampling_reference import ReferenceRow

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
V = 1000


def spec(
    row: int = 0, *, seed: int = 7, choice: int = 0, prompt: tuple[int, ...] = (1, 2, 3), **fields: Any
) -> RowSpec:
    outputs = fields.pop("outputs", ())
    eos = fields.pop("eos", ())
    params = SamplingParams(max_tokens=1000, **fields)
    return row_spec(row, params, seed=seed, choice=choice, prompt=prompt, outputs=outputs, end_token_ids=eos)


def make_logits(num: int, vocab: int = V, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(num, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def open_both(specs: list[RowSpec], vocab: int) -> tuple[CudaSampler, kernels.Sampler]:
    device, host = CudaSampler(len(specs), vocab, DEVICE), kernels.Sampler(len(specs), vocab)
    for row in specs:
        device.open_row(row)
        host.open_row(row)
    device.flush()
    return device, host


def assert_tied(row: RowSpec, outputs: list[int], logits: Tensor, position: int, tokens: tuple[int, int]) -> None:
    """Both tokens are right up to rounding: their scores are equal, or one stands at the very edge of a filter."""
    reference = ReferenceRow(row)
    reference.outputs = outputs
    x = reference.edited(logits.numpy())
    kept = reference.kept(x)
    scores = reference.scores(x, [int(t) for t in tokens], position)
    edge = kept[-1] in tokens or any(t not in kept for t in tokens)
    assert abs(scores[0] - scores[1]) < 1e-4 * max(1.0, abs(scores[0])) or edge, (row, tokens, scores)


def compare(
    specs: list[RowSpec], vocab: int, steps: int, dtype: torch.dtype = torch.float32, spread: float = 3.0
) -> int:
    """Runs both over the same logits; returns how many tokens differ (by float ties, or it fails)."""
    device, host = open_both(specs, vocab)
    rows = torch.arange(len(specs), dtype=torch.int32)
    outputs = [list(row.output_token_ids) for row in specs]
    differing = 0
    for step in range(steps):
        logits = make_logits(len(specs), vocab, seed=step, spread=spread).to(dtype)
        positions = torch.full_like(rows, 20 + step)
        expected, expected_bad = host.sample(logits.float(), rows, positions)
        tokens, bad = device.sample(logits.to(DEVICE), rows.to(DEVICE), positions.to(DEVICE))
        assert bad.cpu().numpy().tolist() == expected_bad.tolist()
        for i, pair in enumerate(zip(tokens.tolist(), expected.tolist(), strict=True)):
            if pair[0] != pair[1]:
                differing += 1
                assert_tied(specs[i], outputs[i], logits[i].float(), 20 + step, pair)
            outputs[i].append(pair[1])
        if differing:
            break  # histories are apart from here on
    return differing


FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "cold": {"temperature": 0.3},
    "very cold": {"temperature": 2e-4},
    "hot": {"temperature": 5.0},
    "top_k 1": {"top_k": 1},
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
    "all together": {
        "min_tokens": 3,
        "eos": (9,),
        "bad_words": ((2,), (7, 8)),
        "logit_bias": ((40, 3.0),),
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "top_p": 0.9,
        "top_k": 100,
        "min_p": 0.001,
        "temperature": 1.4,
    },
}


def random_spec(row: int, vocab: int, chance: random.Random) -> RowSpec:
    fields: dict[str, Any] = {
        "temperature": chance.choice([0.0, 0.5, 1.0, 2.0, chance.uniform(0.1, 4.0)]),
        "top_k": chance.choice([0, 0, 1, 5, 40, 300, 5000]),
        "top_p": chance.choice([1.0, 1.0, 0.95, 0.6, chance.uniform(0.01, 1.0)]),
        "min_p": chance.choice([0.0, 0.0, 0.03, chance.random()]),
        "presence_penalty": chance.choice([0.0, 0.0, 1.5]),
        "frequency_penalty": chance.choice([0.0, 0.0, 0.8]),
        "repetition_penalty": chance.choice([1.0, 1.0, 1.2]),
        "logit_bias": chance.choice([(), ((vocab // 2, 5.0), (vocab - 1, 4.0))]),
        "allowed_token_ids": chance.choice([None, None, tuple(range(0, vocab, 7))]),
        "bad_words": chance.choice([(), ((vocab // 3,), (1, vocab // 4))]),
    }
    prompt = tuple(chance.randrange(vocab) for _ in range(20))
    return spec(row, seed=chance.getrandbits(64), choice=chance.randrange(4), prompt=prompt, **fields)


@pytest.mark.parametrize("at_once", [len(FEATURES), 8])  # with a kernel for filters alone, and without
def test_features(at_once: int) -> None:
    """Eight steps, so that histories matter."""
    features = iter(FEATURES.values())
    while part := list(islice(features, at_once)):
        specs = [spec(row, **fields) for row, fields in enumerate(part)]
        assert compare(specs, V, steps=8) == 0


@pytest.mark.parametrize("vocab", [1, 2, 3, 7, 8, 9, 63, 64, 65, 1023, 1024, 1025, 4099, 50257])
def test_vocabulary_sizes(vocab: int) -> None:
    kinds = ({"temperature": 0.0}, {}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 1500, "top_p": 0.9})
    specs = [spec(row, prompt=(0,), **fields) for row, fields in enumerate(kinds)]
    assert compare(specs, vocab, steps=3) == 0


@pytest.mark.parametrize(
    "vocab,num,dtype", [(4096, 1500, torch.float32), (32001, 400, torch.float32), (151936, 96, torch.bfloat16)]
)
def test_thousands_of_random_rows(vocab: int, num: int, dtype: torch.dtype) -> None:
    chance = random.Random(vocab)
    specs = [random_spec(row, vocab, chance) for row in range(num)]
    assert compare(specs, vocab, steps=2, dtype=dtype) <= num // 500


@pytest.mark.parametrize("vocab", [V, 20000])
def test_equal_logits_go_by_id(vocab: int) -> None:
    """More equal values than are ever sorted; ids decide which of them are kept."""
    kinds = (
        {},
        {"top_k": 3},
        {"top_k": vocab - 7},
        {"top_p": 0.5},
        {"temperature": 0.0},
        {"top_k": 3000, "top_p": 0.5},
    )
    specs = [spec(row, **fields) for row, fields in enumerate(kinds)]
    device, host = open_both(specs, vocab)
    rows = torch.arange(len(specs), dtype=torch.int32)
    for position in range(12):
        logits = torch.zeros(len(specs), vocab)
        logits[:, ::2] = -0.0
        positions = torch.full_like(rows, position)
        expected, _ = host.sample(logits, rows, positions)
        tokens, _ = device.sample(logits.to(DEVICE), rows.to(DEVICE), positions.to(DEVICE))
        assert tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", ["outlier", "geometric", "masked", "two values", "huge"])
def test_odd_distributions(kind: str) -> None:
    vocab = 30000
    torch.manual_seed(0)
    logits = make_logits(6, vocab)
    if kind == "outlier":
        logits[:, 5] = -3e38
    elif kind == "geometric":
        logits = torch.exp2(-torch.rand(6, vocab) * 120) * torch.where(torch.rand(6, vocab) < 0.5, -1.0, 1.0)
    elif kind == "masked":
        logits[:, torch.rand(vocab) < 0.99] = float("-inf")
    elif kind == "two values":
        logits = torch.where(torch.rand(6, vocab) < 0.3, 1.0, -1.0)
    else:
        logits *= 1e36
    kinds = (
        {"top_k": 20},
        {"top_p": 0.9},
        {"top_k": 9000},
        {"top_p": 0.3, "temperature": 3.0},
        {"min_p": 0.3},
        {"top_k": 3000, "top_p": 0.7},
    )
    specs = [spec(row, **fields) for row, fields in enumerate(kinds)]
    device, host = open_both(specs, vocab)
    rows = torch.arange(6, dtype=torch.int32)
    for position in range(5):
        positions = torch.full_like(rows, position)
        expected, bad = host.sample(logits, rows, positions)
        tokens, device_bad = device.sample(logits.to(DEVICE), rows.to(DEVICE), positions.to(DEVICE))
        assert device_bad.tolist() == bad.tolist()
        for i in range(6):
            if tokens[i] != expected[i]:
                assert_tied(specs[i], [], logits[i], position, (int(tokens[i]), int(expected[i])))


def test_a_row_does_not_depend_on_the_batch() -> None:
    chance = random.Random(1)
    specs = [random_spec(row, 5000, chance) for row in range(40)]
    logits = make_logits(40, 5000).to(DEVICE)
    crowd, _ = open_both(specs, 5000)
    together, _ = crowd.sample(logits, torch.arange(40, dtype=torch.int32, device=DEVICE), int32(*[9] * 40))
    for row in range(40):
        alone, _ = open_both(specs, 5000)
        token, _ = alone.sample(logits[row : row + 1], int32(row), int32(9))
        assert token[0] == together[row]


@pytest.mark.parametrize("kind", ["normal", "peaked", "rounded", "flat"])
def test_rows_are_the_same_however_many_there_are(kind: str) -> None:
    """Few rows are held by eight blocks each, of many each has one: the same tokens, beside greedy rows, too."""
    vocab, num = 20011, 300
    chance = random.Random(kind)
    kinds: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {"top_k": 50},
        {"top_k": 40, "top_p": 0.8},
        {"min_p": 0.05},
        {"top_k": 2000, "top_p": 0.7},
        {"top_p": 0.99, "min_p": 0.001},
        {"top_p": 0.9, "repetition_penalty": 1.1},
        {"temperature": 0.0},
        {},
    ]
    specs = [
        spec(row, seed=row, **{"temperature": chance.choice([0.3, 0.7, 1.0, 2.0]), **chance.choice(kinds)})
        for row in range(num)
    ]
    logits = make_logits(num, vocab, spread={"flat": 0.01}.get(kind, 2.0))
    if kind == "peaked":
        logits[:, torch.randperm(vocab, generator=torch.Generator().manual_seed(1))[:40]] += 9
    elif kind == "rounded":
        logits = logits.round()
    expected: list[int] = []
    for size in (num, 1, 8, 17, 40, 100):
        sampler, _ = open_both(specs, vocab)
        tokens: list[int] = []
        for first in range(0, num if size > 1 else 40, size):
            rows = torch.arange(first, min(num, first + size), dtype=torch.int32, device=DEVICE)
            tokens += sampler.sample(logits[first : first + size].to(DEVICE), rows, rows)[0].tolist()
        expected = expected or tokens
        assert tokens == expected[: len(tokens)]
    assert compare(specs, vocab, steps=1) <= 1


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0.0}, {"top_k": 4}, {"top_p": 0.5}, {"logit_bias": ((1, 1.0),)}]
)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, 500, V - 1])
def test_broken_logits_make_a_bad_row_and_touch_nobody_else(fields: dict[str, Any], poison: float, at: int) -> None:
    logits = make_logits(3).to(DEVICE)
    specs = [spec(row, **fields) for row in range(3)]
    good, _ = open_both(specs, V)
    expected, _ = good.sample(logits, int32(0, 1, 2), int32(5, 5, 5))
    logits[1, at] = poison
    sampler, _ = open_both(specs, V)
    tokens, bad = sampler.sample(logits, int32(0, 1, 2), int32(5, 5, 5))
    assert bad.tolist() == [False, True, False]
    assert tokens.tolist() == [expected[0], 0, expected[2]]
    assert sampler.last_tokens.tolist() == [expected[0], -1, expected[2]]


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": ()},
        {"allowed_token_ids": (4,), "bad_words": ((4,),)},
        {"allowed_token_ids": (4,), "min_tokens": 1, "eos": (4,), "temperature": 0.0},
    ],
)
def test_nothing_left_to_sample_is_a_bad_row(fields: dict[str, Any]) -> None:
    sampler, _ = open_both([spec(**fields)], V)
    tokens, bad = sampler.sample(make_logits(1).to(DEVICE), int32(0), int32(0))
    assert bad[0] and tokens[0] == 0


def test_skipped_and_closed_rows_and_canaries() -> None:
    wide = torch.full((4, V + 24), float("nan"), device=DEVICE)
    wide[:, :V] = make_logits(4).to(DEVICE)
    sampler, _ = open_both([spec(row, temperature=0.0) for row in range(3)], V)
    sampler.close_row(1)
    sampler.flush()
    tokens, bad = torch.full((6,), 77, dtype=torch.int32, device=DEVICE), torch.ones(6, dtype=torch.bool, device=DEVICE)
    sampler.sample(wide[:, :V], int32(2, -1, 1, 0), int32(0, 0, 0, 0), tokens[1:5], bad[1:5])
    best = wide[:, :V].argmax(-1).tolist()
    assert tokens.tolist() == [77, best[0], 0, 0, best[3], 77] and bad.tolist() == [
        True,
        False,
        False,
        True,
        False,
        True,
    ]
    assert sampler.resolve(int32(5, 0, 0, 0), int32(NO_ROW, 0, 2, NO_ROW)).tolist() == [5, best[3], best[0], 0]
    sampler.sample(wide[:0, :V], int32(), int32())


def test_rows_reopen_and_histories_restart() -> None:
    sampler = CudaSampler(2, V, DEVICE)
    logits = make_logits(1).to(DEVICE)
    fields = {"temperature": 0.0, "presence_penalty": 100.0}
    seen = []
    for _ in range(2):
        sampler.open_row(spec(0, **fields))
        sampler.flush()
        seen.append([int(sampler.sample(logits, int32(0), int32(p))[0][0]) for p in range(4)])
        sampler.close_row(0)
    assert seen[0] == seen[1] == logits[0].argsort(descending=True)[:4].tolist()
    sampler.open_row(spec(0, outputs=(9, 8)))
    with pytest.raises(_C.Error, match="is open"):
        sampler.open_row(spec(0))
    with pytest.raises(_C.Error, match="not open"):
        sampler.close_row(1)
    with pytest.raises(_C.Error, match="out of range"):
        sampler.open_row(spec(2))
    with pytest.raises(_C.Error, match="outside the vocabulary"):
        sampler.open_row(spec(1, logit_bias=((V, 1.0),)))
    sampler.flush()
    assert sampler.last_tokens.tolist() == [8, -1]


def test_counts_stop_growing_when_their_room_is_used_up() -> None:
    row = row_spec(0, SamplingParams(max_tokens=1, presence_penalty=100.0, temperature=0.0), seed=1, prompt=(1,))
    sampler = CudaSampler(1, V, DEVICE)
    sampler.open_row(row)
    sampler.flush()
    logits = make_logits(1).to(DEVICE)
    tokens = [int(sampler.sample(logits, int32(0), int32(p))[0][0]) for p in range(30)]
    assert len(set(tokens[:17])) == 17 and len(set(tokens)) < 30


@pytest.mark.parametrize("num", [1, 3, 40])
def test_the_host_is_told(num: int) -> None:
    """What comes by pinned memory is what lies on the device; a number goes with it. No address: nothing happens."""
    chance = random.Random(num)
    sampler, _ = open_both([random_spec(row, V, chance) for row in range(num)], V)
    sampler.close_row(num - 1)
    sampler.flush()
    tokens = torch.full((num + 1,), 77, dtype=torch.int32, pin_memory=True)
    bad = torch.zeros(num + 1, dtype=torch.bool, pin_memory=True)
    number = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    read = torch.tensor([1 << 40], device=DEVICE)
    places = [tensor.data_ptr() for tensor in (tokens, bad, number, read)]
    rows, logits = torch.arange(num, dtype=torch.int32, device=DEVICE), make_logits(num).to(DEVICE)

    def told(places: tuple[int, ...]) -> tuple[list[int], list[bool]]:
        by = torch.tensor(places, device=DEVICE)
        sampled = sampler.sample(logits, rows, torch.full_like(rows, 9), told=by)
        torch.cuda.synchronize()
        return sampled[0].tolist(), sampled[1].tolist()

    told(NOT_TOLD)
    assert tokens.tolist() == [77] * (num + 1) and number.item() == 0
    expected, expected_bad = told((*places[:2], 0, 0))
    assert tokens.tolist() == [*expected, 77] and bad.tolist() == [*expected_bad, False] and number.item() == 0
    expected, expected_bad = told(tuple(places))
    assert tokens.tolist() == [*expected, 77] and bad.tolist() == [*expected_bad, False] and number.item() == 1 << 40
    assert expected_bad[-1]


def test_graph_replay_equals_eager() -> None:
    chance = random.Random(4)
    specs = [random_spec(row, 3000, chance) for row in range(24)]
    logits = make_logits(24, 3000).to(DEVICE)
    rows = torch.arange(24, dtype=torch.int32, device=DEVICE)
    rows[5] = -1
    positions = torch.full_like(rows, 3)
    eager, _ = open_both(specs, 3000)
    captured, _ = open_both(specs, 3000)
    tokens, bad = torch.empty_like(rows), torch.empty(24, dtype=torch.bool, device=DEVICE)
    found = ops.DeviceLogprobs.empty(24, 5, DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.sample(logits, rows, positions, tokens, bad)
        ops.logprobs(logits, tokens, 5, found)
    for step in range(3):
        logits.copy_(make_logits(24, 3000, seed=step))
        positions.fill_(step)
        expected, expected_bad = eager.sample(logits, rows, positions)
        graph.replay()
        assert torch.equal(tokens, expected) and torch.equal(bad, expected_bad)
        assert torch.equal(found.top_ids, ops.logprobs(logits, tokens, 5).top_ids)


# --- log-probabilities ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "vocab,top", [(1, 1), (5, 5), (1000, 20), (1025, 1024), (50257, 20), (151936, 0), (151936, 20), (256000, 20)]
)
def test_logprobs(dtype: torch.dtype, vocab: int, top: int) -> None:
    logits = make_logits(5, vocab).to(dtype)
    logits[3] = logits[3].round()  # many equal ones
    chosen = torch.tensor([0, vocab - 1, vocab // 2, vocab // 3, int(logits[4].argmax())], dtype=torch.int32)
    found = ops.logprobs(logits.to(DEVICE), chosen.to(DEVICE), top)
    expected = torch.log_softmax(logits.double(), -1)
    order = np.lexsort((np.broadcast_to(np.arange(vocab), logits.shape), -logits.float().numpy()))[:, :top]
    assert found.top_ids.tolist() == order.tolist()
    wanted = expected.gather(1, torch.from_numpy(order.copy()))
    torch.testing.assert_close(found.top.cpu().double(), wanted, rtol=2e-5, atol=2e-5)
    picked = expected.gather(1, chosen[:, None].long())[:, 0]
    torch.testing.assert_close(found.chosen.cpu().double(), picked, rtol=2e-5, atol=2e-5)
    values = logits.gather(1, chosen[:, None].long())
    assert found.rank.tolist() == (1 + (logits > values).sum(-1)).tolist()


def test_logprobs_of_broken_padded_and_masked_rows() -> None:
    logits = make_logits(5, 3000)
    logits[0, 7] = float("nan")
    logits[1] = float("-inf")
    logits[2] = float("-inf")
    logits[2, [5, 2000]] = torch.tensor([0.0, 1.0])
    found = ops.logprobs(logits.to(DEVICE), int32(1, 1, 5, -1, 4), 4)
    assert found.chosen[[0, 1, 3]].isnan().all() and found.top[[0, 1, 3]].isnan().all()
    assert found.rank.tolist()[:4] == [1, 1, 2, 1] and (found.top_ids[[0, 1, 3]] == 0).all()
    assert found.top_ids[2].tolist() == [2000, 5, 0, 1] and found.top[2, 2:].tolist() == [float("-inf")] * 2
    assert ops.logprobs(logits[:0].to(DEVICE), int32(), 4).top.shape == (0, 4)
