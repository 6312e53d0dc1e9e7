"""Adapters on a GPU: kernels against float64, and a crowd of them through the engine against merged weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.engine import AsyncEngine
from bequest.engine.errors import AdapterInUse, InvalidAdapter
from bequest.engine.types import SamplingParams
from tests.engine.harness import Answer, ask_all, request
from tests.engine.test_against_transformers import Expected, expect, prompts
from tests.tiny_models import make_reference

pytestmark = pytest.mark.gpu

BF16_GAP = 0.25  # as in test_engine
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
NUM_ADAPTERS = 6
MODEL = "qwen2-wide"  # whose steps of a few rows would be chained


# --- kernels -------------------------------------------------------------------------------------------------------

ENDS, DEPTH, SLOTS, MOST_RANK = (64, 96, 128), 96, 5, 32


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def added(x: Tensor, parts: dict[int, tuple[Tensor, Tensor, float]]) -> Tensor:
    """[T, N] float64"""
    result = torch.zeros(len(x), ENDS[-1], dtype=torch.float64)
    for part, (a, b, scale) in parts.items():
        first = 0 if part == 0 else ENDS[part - 1]
        shrunk = (scale * (x.double() @ a.double().T)).float().bfloat16().double()
        result[:, first : ENDS[part]] = shrunk @ b.double()
    return result


@pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 17, 64, 300])
def test_rows_get_what_their_slot_adds(num_rows: int) -> None:
    from bequest.engine.kernels.cuda_lora import LoraTiles, PackedPart, SiteShape, SiteSlots, most_tiles, write_tiles

    device = torch.device("cuda")
    site = SiteSlots(SiteShape(ENDS, DEPTH), SLOTS, MOST_RANK, device)
    content: list[dict[int, tuple[Tensor, Tensor, float]]] = []
    for slot in range(SLOTS):
        parts = {}
        for part in range(slot % 4):  # slot 0 has nothing, 4 neither
            first = 0 if part == 0 else ENDS[part - 1]
            rank = (1, 16, 23, 32)[(slot + part) % 4]
            a = random(rank, DEPTH, seed=slot * 10 + part).bfloat16().float()
            b = random(rank, ENDS[part] - first, seed=slot * 10 + part + 5).bfloat16().float()
            parts[part] = (a, b, 0.5 + part)
            site.write_part(slot, part, PackedPart.of(a, b, 0.5 + part))
        ranks = [len(parts[part][0]) if part in parts else 0 for part in range(len(ENDS))]
        site.describe(slot, ranks, [parts[part][2] if part in parts else 0.0 for part in range(len(ENDS))])
        content.append(parts)
    draw = np.random.default_rng(num_rows)
    slots = draw.integers(-1, SLOTS, num_rows).astype(np.int32)
    rows, tiles = np.full(num_rows, -7, np.int32), np.full((1 + num_rows, 3), -7, np.int32)
    num_tiles = most_tiles(num_rows, SLOTS)
    write_tiles(slots, rows, tiles)
    rows[np.count_nonzero(slots >= 0) :] = 0
    x = random(num_rows, DEPTH, seed=1).bfloat16()
    y = random(num_rows + 2, ENDS[-1], seed=2).bfloat16()  # canaries around
    on_device = y.to(device)
    placed = LoraTiles(torch.from_numpy(rows).to(device), torch.from_numpy(tiles).to(device), num_tiles)
    site.add(x.to(device), on_device[1:-1], placed)
    result = on_device.cpu()
    assert torch.equal(result[0], y[0]) and torch.equal(result[-1], y[-1])
    for i, slot in enumerate(slots.tolist()):
        parts = {} if slot < 0 else content[slot]
        expected = y[i + 1].double() + added(x[i : i + 1], parts)[0]
        touched = torch.zeros(ENDS[-1], dtype=torch.bool)
        for part in parts:
            touched[(0 if part == 0 else ENDS[part - 1]) : ENDS[part]] = True
        assert torch.equal(result[i + 1][~touched], y[i + 1][~touched]), "nothing is added there"
        near = torch.allclose(result[i + 1].double(), expected, rtol=0.02, atol=0.05)
        assert near, (i, slot, (result[i + 1].double() - expected).abs().max())
        alone = y[i + 1 : i + 2].to(device)
        if slot < 0:
            continue
        one = LoraTiles(
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.tensor([[1, 0, 0], [0, 1, slot]], dtype=torch.int32, device=device),
            1,
        )
        site.add(x[i : i + 1].to(device), alone, one)
        assert torch.equal(alone[0].cpu(), result[i + 1]), "a row's bits do not depend on the others"


@pytest.mark.parametrize(
    ("ends", "depth", "num_slots", "num_rows"),
    [
        ((1032, 1536, 2568), 2592, 40, 100),  # pieces of the depth, units of columns that end anywhere
        ((4096, 5120, 6144), 4096, 64, 64),
        ((4096,), 14336, 3, 300),
        ((8, 16), 32, 2100, 2100),  # more tiles than one kernel takes
    ],
)
def test_blocks_that_wait_for_each_other(ends: tuple[int, ...], depth: int, num_slots: int, num_rows: int) -> None:
    """Units of many blocks, launch behind launch: each finds the counters as the one before has left them."""
    from bequest.engine.kernels.cuda_lora import LoraTiles, PackedPart, SiteShape, SiteSlots, most_tiles, write_tiles

    device, most_rank = torch.device("cuda"), 48
    site = SiteSlots(SiteShape(ends, depth), num_slots, most_rank, device)
    draw = torch.Generator().manual_seed(depth)
    a = torch.randn(num_slots, len(ends), most_rank, depth, generator=draw).mul_(depth**-0.5).bfloat16()
    b = torch.randn(num_slots, most_rank, ends[-1], generator=draw).bfloat16()
    ranks = [[(16, 32, 48, 0)[(slot + part) % 4] for part in range(len(ends))] for slot in range(num_slots)]
    for slot, own in enumerate(ranks):
        for part, rank in enumerate(own):
            begin = (0, *ends)[part]
            columns = b[slot, :rank, begin : ends[part]].float()
            site.write_part(slot, part, PackedPart.of(a[slot, part, :rank].float(), columns, 0.5))
        site.describe(slot, own, [0.5] * len(ends))
    slots = np.random.default_rng(depth).permutation(np.arange(num_rows) % (num_slots + 1) - 1).astype(np.int32)
    rows, tiles = np.zeros(num_rows, np.int32), np.zeros((1 + num_rows, 3), np.int32)
    write_tiles(slots, rows, tiles)
    most = most_tiles(num_rows, num_slots)
    placed = LoraTiles(torch.from_numpy(rows).to(device), torch.from_numpy(tiles).to(device), most)
    x = torch.randn(num_rows, depth, generator=draw).bfloat16().to(device)
    expected = torch.zeros(num_rows, ends[-1], dtype=torch.float64, device=device)
    for i, slot in enumerate(slots.tolist()):
        for part, rank in enumerate(ranks[slot] if slot >= 0 else []):
            begin, own_a = (0, *ends)[part], a[slot, part, :rank].to(device).double()
            shrunk = (0.5 * (own_a @ x[i].double())).float().bfloat16().double()
            expected[i, begin : ends[part]] = shrunk @ b[slot, :rank, begin : ends[part]].to(device).double()
    first: Tensor | None = None
    for _ in range(3):
        y = torch.zeros(num_rows, ends[-1], dtype=torch.bfloat16, device=device)
        site.add(x, y, placed)
        first = y if first is None else first
        assert torch.equal(y, first), "launches give the same bits"
        assert torch.equal(site.begun(x, placed), first), "zeros where nothing is added"
    # What A leaves is rounded to bfloat16, here and there at another value.
    assert first is not None and torch.allclose(first.double(), expected, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_and_odd_sizes(dtype: torch.dtype) -> None:
    """Sums of threads: a router of 6 outputs, a gate of one, a depth that no tensor core takes; four rows share x."""
    from bequest.engine.kernels.cuda_lora import LoraTiles, PackedPart, SiteShape, SiteSlots, most_tiles, write_tiles

    device, ends, depth, num_rows = torch.device("cuda"), (6, 7), 50, 40
    site = SiteSlots(SiteShape(ends, depth), SLOTS, MOST_RANK, device, dtype)
    a, b = (random(3, size, seed=size).to(dtype).float() for size in (depth, 1))
    for slot in range(1, SLOTS):  # slot 0 has nothing
        site.write_part(slot, 1, PackedPart.of(a * slot, b, 0.5, dtype))
        site.describe(slot, [0, 3], [0.0, 0.5])
    slots = np.random.default_rng(3).integers(-1, SLOTS, num_rows).astype(np.int32)
    rows, tiles = np.zeros(num_rows, np.int32), np.zeros((1 + num_rows, 3), np.int32)
    write_tiles(slots, rows, tiles)
    x, y = random(num_rows // 4, depth, seed=1).to(dtype), random(num_rows, 7, seed=2).to(dtype)
    placed = LoraTiles(
        torch.from_numpy(rows).to(device), torch.from_numpy(tiles).to(device), most_tiles(num_rows, SLOTS)
    )
    result = y.to(device)
    site.add(x.to(device), result, placed.sharing(4))
    shrunk = (
        0.5
        * torch.from_numpy(slots).clamp(min=0).double()[:, None]
        * (x.double() @ a.double().T)[torch.arange(num_rows) // 4]
    )
    expected = y.double()
    expected[:, 6:] += shrunk @ b.double()
    close = {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    assert torch.allclose(result.cpu().double(), expected, rtol=close, atol=close)
    assert torch.equal(result[:, :6].cpu(), y[:, :6])


# --- the engine ----------------------------------------------------------------------------------------------------


def write_adapter(directory: Path, number: int) -> torch.nn.Module:
    """An adapter of all linear modules of the layers as PEFT saves it; the model with its matrices merged."""
    model, rank, alpha = make_reference(MODEL), (4, 16, 20)[number % 3], 16
    draw = torch.Generator().manual_seed(number + 1)
    tensors = {}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or "layers" not in name:
            continue
        a, b = (
            0.1 * torch.randn(shape, generator=draw)
            for shape in ((rank, module.in_features), (module.out_features, rank))
        )
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
        module.weight.data += alpha / rank * (b @ a)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": "all-linear"}
    (directory / "adapter_config.json").write_text(json.dumps(values))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[Expected]]:
    models = {"": make_reference(MODEL)}
    models |= {f"a{i}": write_adapter(folder / f"a{i}", i) for i in range(NUM_ADAPTERS)}
    return {name: [expect(model, prompt) for prompt in prompts()[::3]] for name, model in models.items()}


def config(directory: Path, folder: Path, count: int = NUM_ADAPTERS, **fields: object) -> EngineConfig:
    shape = {
        "block_size": 16,
        "max_num_batched_tokens": 256,
        "max_model_len": 96,
        "num_blocks": 600,
        "max_num_seqs": 24,
        "dtype": "bfloat16",
        "max_lora_rank": 32,
    }
    lora = [f"a{i}={folder / f'a{i}'}" for i in range(count)]
    return EngineConfig(model=str(directory), device="cuda", lora=lora, **(shape | fields))  # type: ignore[arg-type]


def is_near(answer: Answer, one: Expected) -> bool:
    """Whether all tokens are equal; raises where one lies further below the best than bfloat16 allows."""
    tokens = answer.token_ids[0]
    first = next((i for i, (a, b) in enumerate(zip(tokens, one.tokens, strict=True)) if a != b), None)
    if first is None:
        return True
    best, ours = one.logprobs[first].max(), one.logprobs[first][tokens[first]]
    assert best - ours < BF16_GAP, f"token {first}: {tokens[first]} lies {best - ours:.3f} under the best"
    return False


async def answers(engine: AsyncEngine, names: list[str], salt: str = "") -> dict[str, list[Answer]]:
    asked = [
        request(prompt, GREEDY, adapter=engine.adapters.find(name), cache_salt=salt)
        for name in names
        for prompt in prompts()[::3]
    ]
    found = await ask_all(engine, asked)
    per = len(found) // len(names)
    return {name: found[i * per : (i + 1) * per] for i, name in enumerate(names)}


@pytest.mark.parametrize("fields", [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 7}, {"num_blocks": 60}])
async def test_a_crowd_says_what_merged_weights_say(
    fields: dict[str, object],
    tiny_model: Callable[[str], Path],
    folder: Path,
    expected: dict[str, list[Expected]],
) -> None:
    engine = (await build_engine(config(tiny_model(MODEL), folder, **fields))).engine
    try:
        for _ in range(2):  # the second round finds its prompts in the cache, each adapter its own
            found = await answers(engine, list(expected))
            equal = [is_near(a, e) for name in expected for a, e in zip(found[name], expected[name], strict=True)]
            assert sum(equal) >= len(equal) // 2
        for name in ("a1", ""):  # one alone: the steps of a single row
            (alone, *_) = (await answers(engine, [name], salt="alone"))[name]
            is_near(alone, expected[name][0])
        told = {tuple(found[name][-1].token_ids[0]) for name in expected}
        assert len(told) > NUM_ADAPTERS // 2, "adapters say different things"
    finally:
        await engine.stop()
        engine.scheduler.check_idle()


async def test_loads_and_unloads_beside_requests(
    tiny_model: Callable[[str], Path], folder: Path, expected: dict[str, list[Expected]]
) -> None:
    """Two places for six adapters: each is written again many times, while others answer."""
    engine = (await build_engine(config(tiny_model(MODEL), folder, 1, lora_slots=2, max_loras=2))).engine
    try:
        for i in range(12):
            name = f"a{1 + i % (NUM_ADAPTERS - 1)}"
            await engine.adapters.load(name, folder / name)
            with pytest.raises(InvalidAdapter):
                await engine.adapters.load("more", folder / "a2")
            found = await answers(engine, ["a0", name, ""], salt=str(i))
            for told in ("a0", name, ""):
                for answer, one in zip(found[told], expected[told], strict=True):
                    is_near(answer, one)
            engine.adapters.unload(name)
    except AdapterInUse:
        raise AssertionError("all requests had ended") from None
    finally:
        await engine.stop()
        engine.scheduler.check_idle()


async def test_a_server_without_places_says_so(
    tiny_model: Callable[[str], Path], folder: Path, expected: dict[str, list[Expected]]
) -> None:
    engine = (await build_engine(config(tiny_model(MODEL), folder, 0))).engine
    try:
        with pytest.raises(InvalidAdapter, match="lora_slots"):
            await engine.adapters.load("a0", folder / "a0")
    finally:
        await engine.stop()


async def test_two_places_serve_six_adapters(
    tiny_model: Callable[[str], Path], folder: Path, expected: dict[str, list[Expected]]
) -> None:
    """All at once, and one after the other: whoever has no place waits for one."""
    engine = (await build_engine(config(tiny_model(MODEL), folder, lora_slots=2))).engine
    try:
        found = await answers(engine, list(expected))
        for name in expected:
            for answer, one in zip(found[name], expected[name], strict=True):
                is_near(answer, one)
        for i in range(12):
            name = f"a{i * 5 % NUM_ADAPTERS}"
            (alone, *_) = (await answers(engine, [name], salt=str(i)))[name]
            is_near(alone, expected[name][0])
    finally:
        await engine.stop()
        engine.scheduler.check_idle()
