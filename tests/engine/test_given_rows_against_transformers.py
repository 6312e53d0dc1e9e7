"""Rows that requests bring instead of tokens, against transformers' `inputs_embeds`: alone, in a crowd, chunked, found
in the cache, preempted, continued, beside images."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.engine import AsyncEngine
from bequest.engine.errors import InvalidRequest, ModelError
from bequest.engine.state.contents import ContentKey
from bequest.engine.types import Lineage, Request, SamplingParams, Terms
from bequest.engine.types.hidden import HiddenStatesParams
from bequest.engine.types.image import Detail, Image
from tests.engine.test_images_against_transformers import seer
from tests.tiny_encoder_decoders import save_encoder_decoder
from tests.tiny_models import make_reference, make_tokenizer, save_tiny_model
from tests.tiny_seeing import make_seeing, save_seeing

NUM_TOKENS = 12
HIDDEN = 64
# A plain one, those that multiply the rows of their table or of their model, states and windows.
MODELS = ("llama", "gemma2", "granite", "qwen3-next", "mistral")


_said: dict[tuple[object, ...], tuple[int, ...]] = {}


@functools.cache
def size_of_rows(name: str) -> float:
    """Of those of the table."""
    return float(make_reference(name).get_input_embeddings().weight.detach().std())


class Giver:
    def __init__(self, name: str, engine: AsyncEngine) -> None:
        self.name = name
        self.engine = engine
        self._numbers = iter(range(10**6))

    def rows(self, number: int, length: int = 40) -> torch.Tensor:
        """[length, H], as large as those of the table are."""
        return torch.randn(length, HIDDEN, generator=torch.Generator().manual_seed(number)) * size_of_rows(self.name)

    def word(self, number: int, tenant: str = "", length: int = 40) -> Image:
        rows = self.rows(number, length).detach().numpy()
        key = ContentKey(tenant, bytes([number, length]), Detail())
        return self.engine.contents.take(key, len(rows), lambda first_id: Image.of_rows(rows, first_id))

    async def tokens(self, *parts: Image | tuple[int, ...], tenant: str = "", **fields: Any) -> tuple[int, ...]:
        ids = [token for part in parts for token in (part.token_ids if isinstance(part, Image) else part)]
        images = tuple(part for part in parts if isinstance(part, Image))
        return await self.run(tuple(ids), images, tenant, **fields)

    async def run(self, ids: tuple[int, ...], images: tuple[Image, ...], tenant: str = "", **fields: Any) -> Any:
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        request = Request(f"r{next(self._numbers)}", tenant, ids, params, images=images, **fields)
        answer: list[int] = []
        async for delta in self.engine.generate(request):
            for choice in delta.choices:
                answer += choice.token_ids
            self.usage = delta.usage
        return tuple(answer)

    def expected(self, *parts: torch.Tensor | tuple[int, ...]) -> tuple[int, ...]:
        """What the library says of these rows and tokens; of the same ones once."""
        key = (self.name, *(part.numpy().tobytes() if isinstance(part, torch.Tensor) else part for part in parts))
        if key not in _said:
            _said[key] = self._say(*parts)
        return _said[key]

    def _say(self, *parts: torch.Tensor | tuple[int, ...]) -> tuple[int, ...]:
        reference = make_reference(self.name)
        embedding = reference.get_input_embeddings()
        with torch.no_grad():
            rows = [part if isinstance(part, torch.Tensor) else embedding(torch.tensor(part)) for part in parts]
            whole = torch.cat(rows)[None]
            out = reference.generate(
                inputs_embeds=whole,
                attention_mask=torch.ones(whole.shape[:2], dtype=torch.int64),
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return tuple(out[0].tolist())


@asynccontextmanager
async def giver(name: str, directory: Path, **fields: Any) -> AsyncIterator[Giver]:
    given = {"model": str(directory), "num_blocks": 200, "threads": 1, "dtype": "float32", "allow_prompt_embeds": True}
    built = await build_engine(EngineConfig(**given | fields))
    try:
        yield Giver(name, built.engine)
    finally:
        await built.engine.stop()


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    name = str(request.param)
    return name, save_tiny_model(name, tmp_path_factory.mktemp(name))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


TEXT = (5, 9, 31, 8)


async def test_greedy_tokens(saved: tuple[str, Path]) -> None:
    async with giver(*saved) as hand:
        alone, mixed = hand.expected(hand.rows(1)), hand.expected(TEXT, hand.rows(2), TEXT, hand.rows(1))
        assert await hand.tokens(hand.word(1)) == alone
        parts = (TEXT, hand.word(2), TEXT, hand.word(1))
        crowd = await asyncio.gather(
            hand.tokens(*parts), hand.tokens(hand.word(1)), hand.tokens(TEXT), hand.tokens(*parts)
        )
        assert crowd[0] == mixed == crowd[3] and crowd[1] == alone and crowd[2] == hand.expected(TEXT)
        assert await hand.tokens(*parts) == mixed
        if hand.name != "mistral":  # whose window keeps less
            assert hand.usage is not None and hand.usage.cached_tokens >= 64
        assert hand.engine.scheduler.images.num_runs == 0, "nobody looks at rows"


@pytest.mark.parametrize("batched", [3, 16])
async def test_chunks(saved: tuple[str, Path], batched: int) -> None:
    async with giver(*saved, max_num_batched_tokens=batched, image_cache_mb=1e-6) as hand:
        asked = [hand.tokens(TEXT, hand.word(3), TEXT), hand.tokens(hand.word(4))]
        assert await asyncio.gather(*asked) == [
            hand.expected(TEXT, hand.rows(3), TEXT),
            hand.expected(hand.rows(4)),
        ]


async def test_rows_come_again_after_a_preemption(llama: Path) -> None:
    async with giver("llama", llama, num_blocks=9, host_cache_gb=0, max_num_seqs=4, image_cache_mb=1e-6) as hand:
        words = [hand.word(number) for number in range(5)]
        answers = await asyncio.gather(*(hand.tokens(word, TEXT) for word in words))
        assert answers == [hand.expected(hand.rows(number), TEXT) for number in range(5)]


async def test_children_and_branches(llama: Path) -> None:
    async with giver("llama", llama) as hand:
        word, more = hand.word(1), hand.word(2)
        first = await hand.tokens(word)
        parent = hand.engine.parent("", "r0")
        assert parent.images == (word,) and parent.choices[0].token_ids == (*word.token_ids, *first)
        terms = Terms(lineage=Lineage("r0", 0, 40 + NUM_TOKENS))
        child = await hand.run((*word.token_ids, *first, *more.token_ids), (word, more), terms=terms)
        assert child == hand.expected(hand.rows(1), first, hand.rows(2))
        assert hand.usage is not None and hand.usage.cached_tokens == 40 + NUM_TOKENS - 1
        terms = Terms(lineage=Lineage("r0", 0, 17))
        branch = await hand.run((*word.token_ids[:17], *TEXT), (word,), terms=terms)
        assert branch == hand.expected(hand.rows(1)[:17], TEXT)


async def test_tenants_do_not_share(llama: Path) -> None:
    async with giver("llama", llama) as hand:
        mine = await hand.tokens(hand.word(1, "me"), tenant="me")
        assert await hand.tokens(hand.word(1, "you"), tenant="you") == mine
        assert hand.usage is not None and hand.usage.cached_tokens == 0
        assert hand.word(1, "me").first_id != hand.word(1, "you").first_id


async def test_hidden_states(saved: tuple[str, Path]) -> None:
    async with giver(*saved) as hand:
        word = hand.word(1)
        wanted = HiddenStatesParams(layers=(0, 1, 3), positions="all")
        ids = (*TEXT, *word.token_ids)
        request = Request("states", "", ids, SamplingParams(max_tokens=0), images=(word,), hidden_states=wanted)
        *_, last = [delta async for delta in hand.engine.generate(request)]
        assert last.hidden_states is not None
        ours = last.hidden_states.choices[0].assemble()
        reference = make_reference(hand.name)
        with torch.no_grad():
            rows = torch.cat([reference.get_input_embeddings()(torch.tensor(TEXT)), hand.rows(1)])
            states = reference(inputs_embeds=rows[None], output_hidden_states=True).hidden_states
        for index, layer in enumerate((0, 1, 3)):
            expected = states[layer][0].numpy()
            assert np.abs(ours[index] - expected).max() < 5e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen3-vl", "gemma3", "llava"])
async def test_beside_images(name: str, tmp_path: Path) -> None:
    """Rows turn as text does, have nothing for deep layers, and see only what is before them."""
    directory = save_seeing(name, tmp_path)
    async with seer(name, directory, allow_prompt_embeds=True, max_num_batched_tokens=24) as eyes:
        ids, images = eyes.prompt("the cat ", 0, " sat on the mat")
        said = eyes.prompt(" and", " so on")[0]
        table = make_seeing(name).get_input_embeddings()
        with torch.no_grad():
            rows = table(torch.tensor(said)).numpy()
        word = eyes.engine.contents.take(
            ContentKey("", b"rows", Detail()), len(rows), lambda first_id: Image.of_rows(rows, first_id)
        )
        expected = await eyes.run((*said, *ids, *said), images)
        given = (*word.token_ids, *ids, *word.token_ids)
        assert await eyes.run(given, (*images, word)) == expected
        both = await asyncio.gather(eyes.run(given, (*images, word), cache_salt="x"), eyes.run(said, ()))
        assert both[0] == expected


async def test_what_is_refused(llama: Path, tmp_path: Path) -> None:
    async with giver("llama", llama, allow_prompt_embeds=False) as hand:
        with pytest.raises(InvalidRequest) as refused:
            await hand.tokens(hand.word(1))
        assert refused.value.reason == "no_embeds"
    save_encoder_decoder("t5", tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="its prompts are tokens"):
        async with giver("t5", tmp_path):
            pass
