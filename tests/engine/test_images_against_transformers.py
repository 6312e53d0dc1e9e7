"""Whole models that see against transformers: greedy tokens behind images, however the work is cut and shared."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.engine import AsyncEngine
from bequest.engine.errors import InvalidEstate, InvalidRequest, RetentionTooLarge
from bequest.engine.formats.estate_file import from_bytes as file_to_estate
from bequest.engine.formats.estate_file import to_bytes as estate_to_file
from bequest.engine.state.contents import ContentKey
from bequest.engine.types import Lineage, Request, Retain, SamplingParams, Terms
from bequest.engine.types.estate import Estate
from bequest.engine.types.hidden import HiddenStatesParams
from bequest.engine.types.image import FIRST_ID, Detail, Image, Rgb
from bequest.server.stores.images import ImageStore, RecentContents
from tests.tiny_seeing import (
    IMAGE_ID,
    MAKERS,
    PICTURES,
    WITH_EXPERTS,
    make_seeing,
    reference_pixels,
    save_seeing,
)

NUM_TOKENS = 12


class Seer:
    """An engine of a tiny model, and the images that were shown to it."""

    def __init__(self, name: str, engine: AsyncEngine, tokenizer: Any, pictures: list[Rgb]) -> None:
        assert engine.info.vision is not None
        self.pictures = pictures
        self.name = name
        self.engine = engine
        self.tokenizer = tokenizer
        self.store = ImageStore(engine.info.vision, tokenizer, RecentContents(engine.contents, 1 << 24))
        self._numbers = iter(range(10**6))

    def image(self, index: int, tenant: str = "") -> Image:
        assert self.engine.info.vision is not None
        prepared = self.engine.info.vision.prepare(self.pictures[index], Detail())
        return self.store.take(ContentKey(tenant, bytes([index]), Detail()), prepared)

    def prompt(self, *parts: str | int, tenant: str = "") -> tuple[tuple[int, ...], tuple[Image, ...]]:
        ids: list[int] = []
        images = [self.image(part, tenant) for part in parts if isinstance(part, int)]
        left = iter(images)
        for part in parts:
            ids += self.tokenizer.encode(part, False) if isinstance(part, str) else next(left).token_ids
        return tuple(ids), tuple(images)

    async def tokens(self, *parts: str | int, tenant: str = "", **fields: Any) -> tuple[int, ...]:
        ids, images = self.prompt(*parts, tenant=tenant)
        return await self.run(ids, images, tenant=tenant, **fields)

    async def run(self, ids: tuple[int, ...], images: tuple[Image, ...], tenant: str = "", **fields: Any) -> Any:
        number = next(self._numbers)
        wanted = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True} | fields.pop("params", {})
        params = SamplingParams(**wanted)
        request = Request(f"r{number}", tenant, ids, params, images=images, **fields)
        answer: list[int] = []
        async for delta in self.engine.generate(request):
            for choice in delta.choices:
                answer += choice.token_ids
            self.usage, self.retained = delta.usage, delta.retained
        return tuple(answer)

    def expected(self, *parts: str | int) -> Said:
        """What the library says, given the same tokens and its own pixels."""
        ids, _ = self.prompt(*parts)
        shown = tuple(IMAGE_ID if token >= FIRST_ID else token for token in ids)
        return Said(self.name, shown, [self.pictures[part] for part in parts if isinstance(part, int)])


class Said:
    """What the library says behind a prompt. An answer equals it if each of its tokens is the library's best one behind
    those before: then it is what the library would generate, and one pass tells, where generating takes twelve."""

    def __init__(self, name: str, shown: tuple[int, ...], pictures: list[Rgb]) -> None:
        self._name, self._shown, self._pictures = name, shown, pictures

    def __eq__(self, answer: object) -> bool:
        return isinstance(answer, tuple) and len(answer) == NUM_TOKENS and self._behind(answer) == answer

    __hash__ = None  # type: ignore[assignment]

    def _behind(self, answer: tuple[int, ...]) -> tuple[int, ...]:
        """Tests ask for the same again and again; it is computed once."""
        key = (self._name, self._shown, answer, *((picture.shape, picture.tobytes()) for picture in self._pictures))
        if key not in _said:
            _said[key] = _say(self._name, self._shown, answer, self._pictures)
        return _said[key]


_said: dict[tuple[object, ...], tuple[int, ...]] = {}


# Tests come model by model, and a pass changes none.
_library = functools.lru_cache(maxsize=1)(make_seeing)


@torch.no_grad()
def _say(name: str, shown: tuple[int, ...], answer: tuple[int, ...], pictures: list[Rgb]) -> tuple[int, ...]:
    """The best token behind the prompt, and behind each of the answer but the last."""
    whole = torch.tensor([[*shown, *answer[:-1]]])
    given = {**pixels(name, pictures), **kinds(name, whole)}
    logits = _library(name)(whole, attention_mask=torch.ones_like(whole), use_cache=False, **given).logits
    return tuple(logits[0, len(shown) - 1 :].argmax(-1).tolist())


def kinds(name: str, shown: torch.Tensor) -> dict[str, torch.Tensor]:
    """Which tokens are of images, where the library wants to be told."""
    if name == "gemma3":
        return {"token_type_ids": (shown == IMAGE_ID).int()}
    return {"mm_token_type_ids": (shown == IMAGE_ID).int()} if name.startswith("qwen") else {}


def library_states(name: str, shown: torch.Tensor, pictures: list[Any]) -> list[torch.Tensor]:
    """What each layer begins with, and what the last norm gives. The library's own list of them has what a layer ends
    with, which is not what the next one begins with where rows of an image are added in between."""
    reference = make_seeing(name)
    begun: list[torch.Tensor] = []
    for layer in reference.model.language_model.layers if name not in TILED else reference.model.text_model.layers:
        layer.register_forward_pre_hook(lambda _, given: begun.append(given[0][0]))
    with torch.no_grad():
        given = {**pixels(name, pictures), **kinds(name, shown)}
        out = reference(shown, **given, output_hidden_states=True)
    return [*begun, out.hidden_states[-1][0]]


TILED = ("idefics3", "smolvlm")


def pixels(name: str, pictures: list[Any]) -> dict[str, torch.Tensor]:
    if name not in TILED:
        return reference_pixels(name, pictures)
    # A prompt's frames are one list there, and padding would be taken out again.
    frames = [reference_pixels(name, [picture])["pixel_values"] for picture in pictures]
    return {"pixel_values": torch.cat(frames, dim=1)}


@asynccontextmanager
async def seer(name: str, directory: Path, pictures: list[Rgb] = PICTURES, **fields: Any) -> AsyncIterator[Seer]:
    config = EngineConfig(
        **{"model": str(directory), "num_blocks": 200, "block_size": 16, "threads": 1, "dtype": "float32"} | fields
    )
    built = await build_engine(config)
    try:
        yield Seer(name, built.engine, built.text.tokenizer, pictures)
    finally:
        await built.engine.stop()


@pytest.fixture(scope="module", params=[name for name in MAKERS if name not in WITH_EXPERTS])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    name = str(request.param)
    return name, save_seeing(name, tmp_path_factory.mktemp(name))


ONE = ("the quick ", 0, " brown fox")
THREE = ("the cat ", 1, " sat on", 2, ",", 0, " the mat")


async def test_greedy_tokens(saved: tuple[str, Path]) -> None:
    """Alone, then in a crowd, then found in the cache."""
    async with seer(*saved) as eyes:
        one, three = eyes.expected(*ONE), eyes.expected(*THREE)
        first = await eyes.tokens(*ONE)
        assert first == one and (*first[:-1], first[-1] + 1) != one
        assert eyes.engine.scheduler.images.num_runs == 1
        crowd = await asyncio.gather(*(eyes.tokens(*parts) for parts in (THREE, ONE, ("no image here",), THREE)))
        assert crowd[:2] == [one, three][::-1] and crowd[3] == three
        assert eyes.engine.scheduler.images.num_runs == 3, "an image that was seen is not looked at again"
        assert await eyes.tokens(*THREE) == three
        ids, _ = eyes.prompt(*THREE)
        assert eyes.usage is not None and eyes.usage.cached_tokens >= (len(ids) - 1) // 16 * 16
        assert eyes.engine.scheduler.images.num_runs == 3


@pytest.mark.parametrize("name", WITH_EXPERTS)
async def test_models_with_experts(name: str, tmp_path: Path) -> None:
    """In chunks that end in an image."""
    async with seer(name, save_seeing(name, tmp_path), max_num_batched_tokens=7) as eyes:
        one, three = eyes.expected(*ONE), eyes.expected(*THREE)
        assert await asyncio.gather(eyes.tokens(*THREE), eyes.tokens(*ONE)) == [three, one]


@pytest.mark.parametrize("batched", [3, 7])
async def test_chunks_that_end_in_an_image(saved: tuple[str, Path], batched: int) -> None:
    """The device has room for one image alone, so that they are looked at again and again."""
    async with seer(*saved, max_num_batched_tokens=batched, image_cache_mb=1e-6) as eyes:
        one, three = eyes.expected(*ONE), eyes.expected(*THREE)
        assert await asyncio.gather(eyes.tokens(*THREE), eyes.tokens(*ONE)) == [three, one]
        before = eyes.engine.scheduler.images.num_runs
        assert await eyes.tokens("again ", 1, " now") == eyes.expected("again ", 1, " now")
        assert eyes.engine.scheduler.images.num_runs == before + 1, "others had taken its place"
        assert eyes.engine.scheduler.images.num_rows <= max(eyes.image(i).num_rows for i in range(3))


async def test_preempted_sequences_look_again(saved: tuple[str, Path]) -> None:
    name, directory = saved
    async with seer(name, directory) as eyes:
        longest = len(eyes.prompt(*THREE)[0])
    blocks = 2 * -(-(longest + 1) // 16) + 2
    async with seer(name, directory, num_blocks=blocks, host_cache_gb=0, max_num_seqs=4, image_cache_mb=1e-6) as eyes:
        three, one = eyes.expected(*THREE), eyes.expected(*ONE)
        asked = [eyes.tokens(*(THREE if i % 2 else ONE), cache_salt=str(i)) for i in range(6)]
        assert await asyncio.gather(*asked) == [one, three] * 3


async def test_children_inherit_images(saved: tuple[str, Path]) -> None:
    async with seer(*saved) as eyes, seer(*saved) as others:
        first = await eyes.tokens(*ONE)
        parent = eyes.engine.parent("", "r0")
        whole = parent.choices[0].token_ids
        assert whole[-len(first) :] == first and parent.images == (eyes.image(0),)
        suffix, more = eyes.prompt(" and ", 1)
        terms = Terms(lineage=Lineage("r0", 0, len(whole)))
        child = await eyes.run((*whole, *suffix), (*parent.images, *more), terms=terms)
        assert eyes.engine.scheduler.images.num_runs == 2, "each once"
        images = others.image(0), others.image(1)
        assert [image.first_id for image in images] == [image.first_id for image in (*parent.images, *more)]
        assert await others.run((*whole, *suffix), images) == child
        branch = eyes.prompt(*ONE)[0].index(eyes.image(0).first_id) + 2  # in the middle of the image
        terms = Terms(lineage=Lineage("r0", 0, branch))
        if eyes.name == "gemma3":  # rows of an image have seen each other
            with pytest.raises(InvalidRequest, match="are part of an image"):
                await eyes.run((*whole[:branch], *suffix), (*parent.images, *more), terms=terms)
            return
        assert await eyes.run((*whole[:branch], *suffix), (*parent.images, *more), terms=terms) == await others.run(
            (*whole[:branch], *suffix), images
        )
        assert eyes.engine.scheduler.images.num_runs == 2


async def test_hidden_states_of_images(saved: tuple[str, Path]) -> None:
    async with seer(*saved) as eyes:
        ids, images = eyes.prompt(*THREE)
        wanted = HiddenStatesParams(layers=(0, 1, 3), positions="all")
        request = Request("states", "", ids, SamplingParams(max_tokens=0), images=images, hidden_states=wanted)
        *_, last = [delta async for delta in eyes.engine.generate(request)]
        assert last.hidden_states is not None
        ours = torch.from_numpy(last.hidden_states.choices[0].assemble())
        shown = torch.tensor([[IMAGE_ID if token >= FIRST_ID else token for token in ids]])
        pictures = [PICTURES[part] for part in THREE if isinstance(part, int)]
        states = library_states(eyes.name, shown, pictures)
        for index, layer in enumerate((0, 1, 3)):
            expected = states[layer]
            assert (ours[index] - expected).abs().max() < 5e-5 * expected.abs().max()


async def test_tenants_do_not_see_for_each_other(saved: tuple[str, Path]) -> None:
    async with seer(*saved) as eyes:
        mine = await eyes.tokens(*ONE, tenant="me")
        assert await eyes.tokens(*ONE, tenant="you") == mine
        assert eyes.engine.scheduler.images.num_runs == 2
        assert eyes.usage is not None and eyes.usage.cached_tokens == 0
        assert eyes.image(0, "me").first_id != eyes.image(0, "you").first_id


async def test_what_cannot_be_done_with_images(saved: tuple[str, Path]) -> None:
    async with seer(*saved) as eyes:
        ids, images = eyes.prompt(*ONE)
        with pytest.raises(InvalidRequest) as told:
            await eyes.run(ids, images, params={"prompt_logprobs": 1})
        assert told.value.reason == "images_without_logprobs"
        with pytest.raises(InvalidRequest) as unknown:
            await eyes.run(ids, (eyes.image(1),))
        assert unknown.value.reason == "image_unknown"
        with pytest.raises(InvalidRequest) as without:
            await eyes.run(ids, ())
        assert without.value.reason == "token_unknown"


async def test_estates_travel_with_images(saved: tuple[str, Path]) -> None:
    """The other engine has given the ids to others. Its child computes what is new and one more, and no tower."""
    async with seer(*saved) as eyes, seer(*saved) as others:
        await others.tokens("look ", 2)
        await eyes.tokens("no image here")
        await eyes.tokens(*ONE)
        estate = file_to_estate(estate_to_file(await eyes.engine.export_estate("", "r1")))
        taken = await others.engine.import_estate("", estate, 60.0)
        parent = others.engine.parent("", taken)
        whole = parent.choices[0].token_ids
        assert parent.images[0].first_id != eyes.image(0).first_id and others.image(0) is parent.images[0]
        runs = others.engine.scheduler.images.num_runs
        await child_equals(others, taken, *saved)
        assert others.engine.scheduler.images.num_runs == runs
        # Nothing is left of its blocks: it is computed anew, of the pixels that came with it.
        apart = await others.run(whole, parent.images, cache_salt="apart")
        assert others.engine.scheduler.images.num_runs == runs + 1
        async with seer(*saved) as fresh:
            assert apart == await fresh.run(*renumbered(whole, parent.images, fresh))
        with pytest.raises(InvalidEstate, match="images that the model does not take"):
            wrong = replace(estate.deed.images[0], num_patches=7)
            deed = replace(estate.deed, id="other", images=(wrong, *estate.deed.images[1:]))
            await others.engine.import_estate("", Estate(deed, estate.content), 60.0)


async def test_leases_with_images_outlive_the_process(saved: tuple[str, Path], tmp_path: Path) -> None:
    fields = {"estate_dir": str(tmp_path / "estates")}
    terms = Terms(name="mine", retain=Retain(ttl=600, durable=True))
    async with seer(*saved, **fields) as eyes:
        ids, images = eyes.prompt(*THREE)
        await eyes.run(ids, images, terms=terms)
        assert eyes.retained is not None and eyes.retained.durable, eyes.retained
    for _ in range(2):  # the second time of files that were written again
        async with seer(*saved, **fields) as eyes:
            await eyes.tokens("look ", 2, cache_salt="before")
            runs = eyes.engine.scheduler.images.num_runs
            await child_equals(eyes, "mine", *saved)
            assert eyes.engine.scheduler.images.num_runs == runs, "no tower looks again"
            eyes.engine.set_ttl("", "mine", 900.0)
            await eyes.engine.written()


async def test_pixels_count_where_leases_are_kept(tmp_path: Path) -> None:
    """In files, as the blocks that they would fill: promised, written, found by a later process, and given back."""
    saved = "llava", save_seeing("llava", tmp_path / "model")
    terms = Terms(name="mine", retain=Retain(ttl=600, durable=True))
    fields = {"estate_dir": str(tmp_path / "estates")}
    async with seer(*saved, **fields) as eyes:
        books, block = eyes.engine.retention.books, eyes.engine.retention.books.block_bytes
        ids, images = eyes.prompt(*THREE)
        pixels = -(-sum(image.content.nbytes for image in images) // block)
        assert pixels > 0
        await eyes.run(ids, images, terms=terms)
        written = -(-(len(ids) + NUM_TOKENS - 1) // 16)
        assert books.used == written + pixels
        whole = eyes.engine.parent("", "mine").choices[0].token_ids
        child = Terms(name="child", retain=Retain(ttl=600, durable=True), lineage=Lineage("mine", 0, len(whole)))
        await eyes.run((*whole, *eyes.prompt(" and so on")[0]), images, terms=child)
        both = books.used
        assert written + 2 * pixels < both < 2 * (written + pixels), "blocks are shared, manifests are not"
    async with seer(*saved, **fields) as eyes:
        books = eyes.engine.retention.books
        assert books.used == both
        for name in ("mine", "child"):
            eyes.engine.forget("", name)
        assert books.used == 0
    room = (written + pixels - 0.5) * block / 2**30  # for all of it but the last pixels
    async with seer(*saved, estate_dir=str(tmp_path / "others"), estate_gb=room) as eyes:
        with pytest.raises(RetentionTooLarge):
            await eyes.run(*eyes.prompt(*THREE), terms=terms)
        assert eyes.engine.retention.books.used == 0
        await eyes.run(eyes.prompt("no image here")[0], (), terms=terms)


async def child_equals(eyes: Seer, parent: str, name: str, directory: Path) -> None:
    """A child of it has the tokens that it would have had without, and computes its suffix and one token."""
    found = eyes.engine.parent("", parent)
    whole, suffix = found.choices[0].token_ids, eyes.prompt(" and so on")[0]
    terms = Terms(lineage=Lineage(parent, 0, len(whole)))
    child = await eyes.run((*whole, *suffix), found.images, terms=terms)
    assert eyes.usage is not None and eyes.usage.cached_tokens == len(whole) - 1
    async with seer(name, directory) as fresh:
        ids, images = renumbered((*whole, *suffix), found.images, fresh)
        assert child == await fresh.run(ids, images)


def renumbered(
    ids: tuple[int, ...], images: tuple[Image, ...], eyes: Seer
) -> tuple[tuple[int, ...], tuple[Image, ...]]:
    """The same prompt for another engine, which has ids of its own."""
    by_content = {eyes.image(index).content.tobytes(): eyes.image(index) for index in range(3)}
    here = {image.first_id: by_content[image.content.tobytes()] for image in images}
    moved = list(ids)
    for image in images:
        of_image = range(image.first_id, image.first_id + image.num_rows)
        moved = [
            here[image.first_id].first_id + old - image.first_id if old in of_image else new
            for old, new in zip(ids, moved, strict=True)
        ]
    return tuple(moved), tuple(here.values())
