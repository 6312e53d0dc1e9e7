"""Images on a GPU: tokens of transformers in float32, with graphs and eagerly, chunked, preempted, continued."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from bequest.engine.types import Lineage, Terms
from bequest.engine.types.image import Rgb
from tests.engine.test_images_against_transformers import ONE, THREE, seer
from tests.tiny_seeing import PICTURES, picture, save_seeing

pytestmark = pytest.mark.gpu

NAMES = ["llava", "llava-siglip", "smolvlm", "qwen2.5-vl"]
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
