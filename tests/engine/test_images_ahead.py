"""Images whose towers run before their requests come: the same tokens, each image once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from bequest.engine.watching.observation import StepStats
from tests.engine.harness import until
from tests.engine.test_images_against_transformers import ONE, THREE, Seer, seer
from tests.tiny_seeing import save_seeing

pytest.importorskip("PIL")


class _Watched:
    """What steps did with images."""

    def __init__(self, eyes: Seer) -> None:
        self.seen = self.found = self.steps = 0
        eyes.engine.observer = self  # type: ignore[assignment]

    def on_step(self, stats: StepStats) -> None:
        self.steps += 1
        self.seen += stats.images_seen
        self.found += stats.images_found

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl", "gemma3"])
async def test_the_tower_looks_before_the_request_comes(name: str, tmp_path: Path) -> None:
    async with seer(name, save_seeing(name, tmp_path)) as eyes:
        watched, images = _Watched(eyes), eyes.engine.scheduler.images
        _, (image,) = eyes.prompt(*ONE)
        eyes.engine.look_ahead(image)
        eyes.engine.look_ahead(image)
        assert await eyes.tokens(*ONE) == eyes.expected(*ONE)
        assert (images.num_runs, watched.seen, watched.found) == (1, 1, 0)
        # One that nobody asks for, and one of three.
        _, (other, last, _) = eyes.prompt(*THREE)
        eyes.engine.look_ahead(other)
        await eyes.engine.probe()
        assert await eyes.tokens(*THREE) == eyes.expected(*THREE)
        assert (images.num_runs, watched.seen) == (3, 3) and watched.found <= 1
        eyes.engine.look_ahead(last)
        assert images.num_runs == 3, "it is there"


async def test_a_busy_device_looks_at_nothing_ahead(tmp_path: Path) -> None:
    async with seer("qwen2.5-vl", save_seeing("qwen2.5-vl", tmp_path)) as eyes:
        _, (image,) = eyes.prompt(*ONE)
        asked = asyncio.create_task(eyes.tokens("no image here", params={"max_tokens": 40}))
        await until(lambda: eyes.engine.num_steps > 0)
        eyes.engine.look_ahead(image)
        assert not asked.done() and not eyes.engine.scheduler.images.planned
        await asked
        assert eyes.engine.scheduler.images.num_runs == 0


async def test_images_ahead_give_way(tmp_path: Path) -> None:
    """To those that requests need, where there is room for one alone."""
    directory = save_seeing("qwen2.5-vl", tmp_path)
    async with seer("qwen2.5-vl", directory, image_cache_mb=0.001) as eyes:
        _, (first, second, _) = eyes.prompt(*THREE)
        for image in (first, second):
            eyes.engine.look_ahead(image)
            await eyes.engine.probe()
        assert await eyes.tokens(*THREE) == eyes.expected(*THREE)
        assert await eyes.tokens(*ONE) == eyes.expected(*ONE)
