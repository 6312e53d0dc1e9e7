"""Beams that the device chooses from the candidates of the step before, against those that the host would choose."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from bequest.engine.kernels import cuda_beams
from bequest.engine.runner.catalogues import PlacedCatalogues
from bequest.engine.runner.cuda_beams import CudaBeams
from bequest.engine.runner.following import Followed
from bequest.engine.types import (
    BeamCandidates,
    BeamParams,
    BeamSpec,
    CatalogueSpec,
    SamplingParams,
    StepBatch,
    StepMoves,
    StepPlan,
    StepRows,
    StepSamples,
)
from bequest.engine.types.catalogue import Catalogue
from bequest.engine.types.plan import Following
from tests.engine.direct import LLM
from tests.engine.test_against_transformers import prompts
from tests.gpu.test_engine import config
from tests.kernels.test_beams import V, make_logits

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
ENDS = (3, 17, 500, 998)
HANDLE = 7
ITEMS = np.unique(np.random.default_rng(0).integers(0, V, (40_000, 4), np.int32), axis=0)


def plan_of(specs: tuple[BeamSpec, ...], first_token: int, copies: np.ndarray) -> StepPlan:
    """Its beams are the tokens from `first_token` on; nothing else of it is looked at."""
    num = first_token + sum(len(spec.scores) for spec in specs)
    ints = np.zeros(num, np.int32)
    none = np.empty((0, 2), np.int32)
    batch = StepBatch(
        input_ids=np.full(num, 900, np.int32),
        input_rows=ints,
        positions=ints,
        slot_mapping=np.zeros((1, num), np.int64),
        query_start=ints,
        seq_lens=ints,
        block_tables=np.zeros((1, num, 1), np.int32),
    )
    return StepPlan(
        step=1,
        batch=batch,
        moves=StepMoves(swaps_out=none, swaps_in=none, copies=copies),
        rows=StepRows(),
        samples=StepSamples(tokens=np.arange(num, dtype=np.int32), rows=ints, positions=ints),
        beams=specs,
    )


def spec_of(name: str, num_rows: int, first_sample: int, width: int, *, bound: bool) -> BeamSpec:
    return BeamSpec(
        request_id=name,
        first_sample=first_sample,
        scores=np.random.default_rng(first_sample).normal(-9, 2, num_rows).astype(np.float32),
        num_candidates=5 * width,
        catalogue=CatalogueSpec(handle=HANDLE, end_token_ids=ENDS) if bound else None,
        nodes=np.zeros(num_rows, np.int32) if bound else None,
    )


def following_specs(
    before: tuple[BeamSpec, ...], widths: list[int], first: int, per_beam: int, draw: random.Random
) -> tuple[tuple[BeamSpec, ...], np.ndarray]:
    """The groups in another order, a new one before them and a copy that is nobody's; and the copies."""
    new, first_copy = spec_of(f"new{len(before)}", 1, first, 4, bound=False), 1
    specs, first_sample = [new], first + 1
    for group in draw.sample(range(len(before)), len(before)):
        width, bound = widths[group], before[group].nodes is not None
        following = Following(group=group, ends=ENDS, first_copy=first_copy, num_copies=width * per_beam)
        nodes = np.zeros(width, np.int32) if bound else None
        scores = np.zeros(width, np.float32)
        specs.append(
            structs.replace(before[group], first_sample=first_sample, scores=scores, nodes=nodes, following=following)
        )
        first_sample, first_copy = first_sample + width, first_copy + width * per_beam
    copies = np.stack([np.arange(first_copy + 1), 10_000 + np.arange(first_copy + 1)], axis=1).astype(np.int32)
    return tuple(specs), copies


def same(one: BeamCandidates, other: BeamCandidates) -> None:
    assert one.bad == other.bad
    for field in ("rows", "tokens", "scores", "logprobs"):
        assert np.array_equal(getattr(one, field), getattr(other, field)), field


@pytest.mark.parametrize("per_beam", [0, 1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_they_are_those_of_the_host(seed: int, per_beam: int) -> None:
    draw = random.Random(seed)
    widths = [draw.choice([1, 2, 5, 32, 33, 100, 600]) for _ in range(draw.randint(1, 4))]
    rows = [draw.choice([1, width]) for width in widths]
    bounds = [draw.random() < 0.4 for _ in widths]
    catalogue, catalogues = Catalogue(ITEMS, V), PlacedCatalogues(DEVICE)
    catalogues.register(HANDLE, catalogue)
    on_device, plain = (CudaBeams(V, 4096, DEVICE, catalogues) for _ in range(2))
    first = draw.randint(0, 3)
    starts = np.cumsum([first, *rows])
    specs = tuple(spec_of(f"r{i}", rows[i], int(starts[i]), widths[i], bound=bounds[i]) for i in range(len(widths)))
    followed, copies = Followed(catalogues.child_of_each), np.empty((0, 2), np.int32)
    for step in range(3):
        plan = plan_of(specs, first, copies)
        settled = followed.fill(plan)
        logits = make_logits(plan.num_tokens, V, seed=seed + step)
        if step == 1:
            logits[:, 40:] = -torch.inf  # too few candidates for the widest
        logits = logits.to(DEVICE)
        input_ids = torch.from_numpy(plan.batch.input_ids.copy()).to(DEVICE)
        moved = torch.from_numpy(np.concatenate([plan.moves.copies, [[-5, -6]]]).astype(np.int32)).to(DEVICE)
        on_device.follow(plan, input_ids, moved)
        found, expected = on_device.launch(logits, plan.beams), plain.launch(logits, settled.beams)
        torch.cuda.synchronize()
        assert input_ids.tolist() == settled.batch.input_ids.tolist()
        assert moved.tolist() == [*settled.moves.copies.tolist(), [-5, -6]]
        candidates = found.read()
        for one, other in zip(candidates, expected.read(), strict=True):
            same(one, other)
        followed.note(settled.beams, candidates)
        first = draw.randint(0, 3)
        widths = [spec.num_candidates // 5 for spec in settled.beams]
        specs, copies = following_specs(settled.beams, widths, first, per_beam, draw)


@pytest.mark.parametrize("eager", [False, True])
def test_searches_have_the_answers_of_the_plain_loop(
    eager: bool, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain loop launches nothing behind a step; the other one does."""
    chosen, follow = [0], cuda_beams.follow_beams_at

    def counted(*args: Any) -> None:
        chosen[0] += 1
        follow(*args)

    monkeypatch.setattr(cuda_beams, "follow_beams_at", counted)
    kinds = [
        SamplingParams(max_tokens=count, n=min(2, width), temperature=0, beams=BeamParams(width), ignore_eos=count < 5)
        for width, count in [(8, 3), (1, 4), (32, 3), (5, 9), (100, 2)]
    ]
    asked = [(prompt, params) for params in kinds for prompt in prompts()[:4]]
    settings = {"dtype": "float32", "num_blocks": 3000, "max_num_seqs": 64, "enforce_eager": eager}
    answers = []
    for pipelined in (True, False):
        with LLM(config(tiny_model("qwen3"), pipelined=pipelined, **settings)) as llm:
            alone = [llm.generate([prompt], params, progress=False)[0] for prompt, params in asked]
            crowd = llm.generate([p for p, _ in asked], [params for _, params in asked], progress=False)
            found = [[choice.token_ids for choice in answer.choices] for answer in [*alone, *crowd]]
            answers.append((found, chosen[0]))
            chosen[0] = 0
    assert answers[0][0] == answers[1][0]
    assert answers[0][1] > 0 and answers[1][1] == 0
