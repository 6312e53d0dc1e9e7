"""Images on a GPU: tokens of transformers in float32, with graphs and eagerly, chunked, preempted, continued."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bequest.engine.backends.cuda.backend import CudaBackend
from bequest.engine.kernels import cuda_attention, cuda_windows
from bequest.engine.models.load import load_model
from bequest.engine.models.towers.grid_places import Parts
from bequest.engine.types import Lineage, Terms
from bequest.engine.types.image import Rgb
from tests.engine.test_given_rows_against_transformers import TEXT, giver
from tests.engine.test_images_against_transformers import ONE, THREE, seer
from tests.tiny_models import save_tiny_model
from tests.tiny_seeing import PICTURES, picture, save_seeing

pytestmark = pytest.mark.gpu

NAMES = ["llava", "llava-siglip", "smolvlm", "qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe", "qwen3.5", "gemma3"]
# Those of the first two need no Pillow.
SQUARES = [picture(28, 28, seed) for seed in range(3)]


@pytest.fixture(params=NAMES)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, list[Rgb]]:
    name = str(request.param)
    if not name.startswith("llava"):
        pytest.importorskip("PIL")
    return name, save_seeing(name, tmp_path), SQUARES if name.startswith("llava") else PICTURES


@pytest.mark.parametrize("eager", [False, True])
async def test_greedy_tokens(saved: tuple[str, Path, list[Rgb]], eager: bool) -> None:
    async with seer(*saved, device="cuda", threads=None, enforce_eager=eager) as eyes:
        one, three = eyes.expected(*ONE), eyes.expected(*THREE)
        assert await eyes.tokens(*ONE) == one
        crowd = await asyncio.gather(*(eyes.tokens(*parts) for parts in (THREE, ONE, ("no image here",), THREE)))
        assert crowd[:2] == [three, one] and crowd[3] == three
        assert eyes.engine.scheduler.images.num_runs == 3
        assert await eyes.tokens(*THREE) == three
        ids, _ = eyes.prompt(*THREE)
        assert eyes.usage is not None and eyes.usage.cached_tokens >= (len(ids) - 1) // 16 * 16


async def test_chunks_and_little_room(saved: tuple[str, Path, list[Rgb]]) -> None:
    fields = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "image_cache_mb": 1e-6}
    async with seer(*saved, device="cuda", threads=None, **fields) as eyes:
        one, three = eyes.expected(*ONE), eyes.expected(*THREE)
        assert await asyncio.gather(eyes.tokens(*THREE), eyes.tokens(*ONE)) == [three, one]


async def test_children_inherit_images(saved: tuple[str, Path, list[Rgb]]) -> None:
    async with seer(*saved, device="cuda", threads=None) as eyes:
        await eyes.tokens(*ONE)
        parent = eyes.engine.parent("", "r0")
        whole = parent.choices[0].token_ids
        suffix, more = eyes.prompt(" and ", 1)
        terms = Terms(lineage=Lineage("r0", 0, len(whole)))
        child = await eyes.run((*whole, *suffix), (*parent.images, *more), terms=terms)
        assert eyes.engine.scheduler.images.num_runs == 2
        assert await eyes.run((*whole, *suffix), (*parent.images, *more), cache_salt="apart") == child


async def test_bfloat16_runs(saved: tuple[str, Path, list[Rgb]]) -> None:
    async with seer(*saved, device="cuda", threads=None, dtype="bfloat16") as eyes:
        assert len(await eyes.tokens(*THREE)) == 12
        assert torch.cuda.is_available()


async def test_a_token_behind_an_image_is_not_attended_to_by_its_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of a step of one token takes the position for the place, and would leave out the last keys."""
    pytest.importorskip("PIL")
    positions: list[int] = []
    attend_token = cuda_attention.attend_token

    def noted(*arguments: Any, **others: Any) -> torch.Tensor:
        positions.append(int(arguments[6]))
        return attend_token(*arguments, **others)

    monkeypatch.setattr(cuda_attention, "attend_token", noted)
    directory = save_seeing("qwen2.5-vl", tmp_path)
    async with seer(
        "qwen2.5-vl", directory, PICTURES, device="cuda", threads=None, dtype="bfloat16", enforce_eager=True
    ) as eyes:
        await eyes.tokens(*THREE)
        assert not positions
        await eyes.tokens("no image here")
        assert positions


def test_windows_of_several_lengths() -> None:
    """In bfloat16 they are attended to in one launch; the other way is by length."""
    lengths = np.asarray([64, 16, 64, 3, 1], np.int32)
    generator = torch.Generator("cuda").manual_seed(0)
    size = 3, int(lengths.sum()), 4, 80
    heads = torch.randn(size, device="cuda", generator=generator, dtype=torch.bfloat16)
    parts = Parts(lengths, torch.device("cuda"))
    expected = parts.attend(*heads.float())
    assert (parts.attend(*heads).float() - expected).abs().max() < 0.02


@pytest.mark.parametrize("lengths", [[64, 16, 64, 3, 1, 17, 48], [1], [64] * 300])
def test_windows_are_turned_and_attended_to(lengths: list[int]) -> None:
    """By one kernel. What lies behind the last window is nobody's."""
    count, begin = sum(lengths), np.cumsum([0, *lengths]).astype(np.int32)
    generator = torch.Generator("cuda").manual_seed(1)
    qkv = torch.randn(count + 5, 3, 4, 80, device="cuda", generator=generator, dtype=torch.bfloat16)
    qkv[count:] = torch.nan
    angles = torch.randn(count + 5, 40, device="cuda", generator=generator)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    gathered = cuda_windows.attend_windows(qkv, torch.from_numpy(begin).cuda(), cos_sin)
    cos, sin = cos_sin[:count, None].chunk(2, dim=-1)

    def turned(heads: torch.Tensor) -> torch.Tensor:
        first, second = heads.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).bfloat16().float()

    query, key, value = qkv[:count].float().unbind(1)
    parts = Parts(np.asarray(lengths, np.int32), torch.device("cuda"))
    expected = parts.attend(turned(query), turned(key), value)
    assert (gathered[:count].float() - expected).abs().max() < 0.02


@pytest.mark.parametrize("head_dim", [72, 80])
@pytest.mark.parametrize("count", [1, 7, 63, 64, 65, 127, 128, 129, 256, 385, 1023, 5476])
def test_all_patches_of_an_image(count: int, head_dim: int) -> None:
    """By one kernel. What lies behind the last patch is nobody's."""
    generator = torch.Generator("cuda").manual_seed(2)
    given = torch.randn(count + 130, 3, 3, head_dim, device="cuda", generator=generator, dtype=torch.bfloat16)
    given[:, :2] *= 2  # some weights are large
    given[count:] = torch.nan
    assert cuda_windows.has_image_kernel(given.dtype, head_dim)
    gathered = cuda_windows.attend_image(given[:count])
    query, key, value = given[:count].float().unbind(1)
    expected = Parts(np.asarray([count]), torch.device("cuda")).attend(query, key, value)
    assert (gathered.float() - expected).abs().max() < 0.03


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_tower_waits_for_nothing(tmp_path: Path) -> None:
    """A run of a size that was seen before is queued behind what the device does."""
    loaded = load_model(save_seeing("qwen2.5-vl", tmp_path), "bfloat16", backend=CudaBackend(torch.device("cuda", 0)))
    assert loaded.tower is not None
    pixels = np.zeros((1, 24, 40, 3), np.uint8)
    loaded.tower.look(pixels)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.set_sync_debug_mode("error")
        try:
            loaded.tower.look(pixels)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl", "qwen3-vl"])
def test_graphs_of_a_tower(name: str, tmp_path: Path) -> None:
    """From the second image of a size on; the sizes take turns, and one more than are kept comes in between."""
    loaded = load_model(save_seeing(name, tmp_path), "bfloat16", backend=CudaBackend(torch.device("cuda", 0)))
    tower = loaded.tower
    assert tower is not None
    random = np.random.default_rng(3)
    side = 28 if name == "llava" else 8
    counts = range(1, 11) if name != "llava" else [3] * 10
    shapes = [(1, 3 * side, side * count, 3) if name != "llava" else (1, 28, 28, 3) for count in counts]
    pixels = [random.integers(0, 256, shape, np.uint8) for shape in [*shapes, *shapes, *shapes[-6:], *shapes[-6:]]]
    with torch.cuda.stream(torch.cuda.Stream()):
        expected = [tower.look(given) for given in pixels]
        tower.use_graphs(torch.cuda.graph_pool_handle())
        rows = [tower.look(given) for given in pixels]
        torch.cuda.synchronize()
    for one, other in zip(rows, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["llama", "granite"])
async def test_given_rows(name: str, tmp_path: Path) -> None:
    """Instead of tokens, beside tokens, and in chunks."""
    fields = {"device": "cuda", "threads": None, "max_num_batched_tokens": 24}
    async with giver(name, save_tiny_model(name, tmp_path), **fields) as hand:
        asked = [hand.tokens(hand.word(1)), hand.tokens(TEXT, hand.word(2), TEXT)]
        assert await asyncio.gather(*asked) == [hand.expected(hand.rows(1)), hand.expected(TEXT, hand.rows(2), TEXT)]
