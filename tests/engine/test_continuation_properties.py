"""A continuation gives the tokens and log-probabilities of one fresh request with the same tokens, whatever its
parent's length, grade and place, wherever it branches, however deep; and it computes what it says it computes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import hypothesis.strategies as st
from hypothesis import example, given, settings

from bequest.engine.engine import AsyncEngine
from bequest.engine.types import Inheritance, Lineage, ParentChoice, Request, Retain, SamplingParams, Terms
from tests.engine.harness import Answer, Setup, ask, ask_all, request, running, until
from tests.engine.paged_fake import PagedFakeRunner, expected_tokens

MAX_LEN = 320
ENOUGH = MAX_LEN // 4
AMPLE = Setup(num_blocks=2000, block_size=4, num_lease_blocks=800, num_host_blocks=50, max_model_len=MAX_LEN)
# One longest request fits beside the leases; those that do not fit their few blocks here must go to the host.
TINY = replace(AMPLE, num_blocks=1 + ENOUGH + 6, num_lease_blocks=6, num_host_blocks=700)
STOPS = frozenset(range(0, 997, 6))


@dataclass(frozen=True)
class Generation:
    """One request of a line, and how the next one continues from it."""

    kept: str  # "leased", "warm" or "running"
    max_tokens: int
    n: int
    stops: bool  # may end early, with a token that is not shown
    choice: int
    place: str  # where the next one begins: "end", "last" or "index"
    part: float  # of the parent's tokens, for "index"
    suffix: int


generations = st.builds(
    Generation,
    kept=st.sampled_from(["leased", "leased", "warm", "running"]),
    max_tokens=st.sampled_from([0, 1, 2, 3, 4, 5, 8, 12]),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    stops=st.booleans(),
    choice=st.integers(0, 2),
    place=st.sampled_from(["end", "end", "last", "index"]),
    part=st.floats(0, 1),
    suffix=st.sampled_from([0, 0, 1, 2, 3, 4, 5, 7, 17, 40]),
)
setups = st.builds(
    lambda base, chunk, caching, pipelined: replace(base, chunk=chunk, prefix_caching=caching, pipelined=pipelined),
    st.sampled_from([AMPLE, TINY]),
    st.sampled_from([3, 16, 4096]),
    st.booleans(),
    st.booleans(),
)


class Line:
    """A request, its child, the child's child."""

    def __init__(self, setup: Setup, engine: AsyncEngine, runner: PagedFakeRunner) -> None:
        self.setup = setup
        self.engine = engine
        self.runner = runner
        self.sources: list[str] = []

    async def run(self, length: int, line: list[Generation]) -> None:
        asked = self.ask_for([100 + i for i in range(length)], line[0], None)
        for here, following in zip(line, [*line[1:], None], strict=True):
            if here.kept == "running" and here.max_tokens > 0:
                asked = await self.continue_while_running(asked, here, following)
            else:
                await self.check_answer(asked)
                asked = None if following is None else self.child(asked.id, here, following)
            if asked is None:
                return
            if self.setup.num_blocks == TINY.num_blocks:
                await self.flood()

    def ask_for(self, prompt: list[int], wanted: Generation, lineage: Lineage | None) -> Request:
        params = SamplingParams(
            max_tokens=min(wanted.max_tokens, MAX_LEN - len(prompt)),
            n=wanted.n,
            temperature=0,
            ignore_eos=True,
            stop_token_ids=STOPS if wanted.stops else frozenset(),
            logprobs=0,
        )
        retain = Retain(600) if wanted.kept == "leased" else None
        return request(prompt, params, lineage=lineage, retain=retain)

    def child(self, parent: str, here: Generation, following: Generation) -> Request | None:
        known = self.engine.parent("t", parent)
        choice = min(here.choice, len(known.choices) - 1)
        tokens = known.choices[choice].token_ids
        at = self.place_of(known.choices[choice], here)
        prompt = [*tokens[:at], *(700 + i for i in range(here.suffix))]
        if len(prompt) > MAX_LEN - 15:
            return None
        return self.ask_for(prompt, following, Lineage(parent, choice, at))

    @staticmethod
    def place_of(choice: ParentChoice, here: Generation) -> int:
        tokens = len(choice.token_ids)
        return {"end": choice.shown_len, "last": tokens, "index": 1 + int(here.part * (tokens - 1))}[here.place]

    async def continue_while_running(
        self, asked: Request, here: Generation, following: Generation | None
    ) -> Request | None:
        """The child begins at what its parent has when its first tokens are out."""
        stream: AsyncIterator = self.engine.generate(asked)
        await anext(stream)
        child = None if following is None else self.child(asked.id, here, following)
        if child is not None:
            early = self.quickly(child)
            answer = await ask(self.engine, early)
            check_tokens(early, answer)
            check_report(early, answer.inheritance)
        async for _ in stream:
            pass
        return child

    @staticmethod
    def quickly(child: Request) -> Request:
        """The same with two tokens, so that it can be asked again as a generation of its own."""
        params = replace(child.params, max_tokens=min(2, child.params.max_tokens), n=1)
        return replace(child, id=child.id + "-early", params=params, terms=replace(child.terms, retain=None))

    async def check_answer(self, asked: Request) -> None:
        guaranteed = self.expected_inheritance(asked)
        before = await self.tokens_run()
        answer = await ask(self.engine, asked)
        ran = await self.tokens_run() - before
        params = asked.params
        tokens = check_tokens(asked, answer)
        assert answer.retained is not None or asked.terms.retain is None
        again = replace(asked, id=asked.id + "-fresh", tenant="fresh", terms=Terms(keep_record=False))
        fresh = await ask(self.engine, again)
        assert (fresh.token_ids, fresh.logprobs, fresh.finish) == (answer.token_ids, answer.logprobs, answer.finish)
        assert answer.usage is not None
        computed = len(asked.prompt_token_ids) - answer.usage.cached_tokens
        decoded = sum(max(0, len(choice) - 1) for choice in tokens)
        past_the_end = params.n if self.setup.pipelined and params.stop_token_ids else 0
        assert computed + decoded <= ran <= computed + decoded + past_the_end
        if asked.terms.lineage is None:
            assert answer.inheritance is None
            return
        told = check_report(asked, answer.inheritance)
        assert told.inherited_tokens == answer.usage.cached_tokens
        self.sources.append(told.source)
        if guaranteed is not None:
            assert told.inherited_tokens == guaranteed
            assert told.source in ("blocks", "host")
        else:
            assert told.source != "host"

    async def tokens_run(self) -> int:
        """By the steps so far, also those that were launched past somebody's end."""
        await until(lambda: not self.engine._launched)
        return self.runner.num_tokens

    def expected_inheritance(self, asked: Request) -> int | None:
        """What a lease, or room for all, guarantees; None where nothing does."""
        lineage = asked.terms.lineage
        if lineage is None:
            return None
        record = self.engine.retention.find("t", lineage.parent)
        if record.leased or self.setup.num_blocks == AMPLE.num_blocks:
            computed = max(record.kept[lineage.choice].num_prompt, len(record.kept[lineage.choice].tokens) - 1)
            return min(lineage.at, computed, len(asked.prompt_token_ids) - 1)
        return None

    async def flood(self) -> None:
        """Others fill the cache."""
        params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
        await ask_all(self.engine, [request([300 + i] * 60, params, tenant="other") for i in range(4)])


def check_tokens(asked: Request, answer: Answer) -> list[list[int]]:
    expected = expected_tokens(asked.prompt_token_ids, asked.params.max_tokens)
    stops = [i for i, token in enumerate(expected) if token in asked.params.stop_token_ids]
    expected = expected[: stops[0] + 1] if stops else expected
    assert answer.token_ids == dict.fromkeys(range(asked.params.n), expected)
    return list(answer.token_ids.values())


def check_report(asked: Request, told: Inheritance | None) -> Inheritance:
    assert asked.terms.lineage is not None and told is not None
    assert (told.parent, told.at) == (asked.terms.lineage.parent, asked.terms.lineage.at)
    assert told.inherited_tokens + told.computed_tokens == len(asked.prompt_token_ids)
    assert told.computed_tokens >= 1
    return told


def run_line(setup: Setup, length: int, line: list[Generation]) -> list[str]:
    async def run() -> list[str]:
        async with running(setup) as (engine, runner):
            whole = Line(setup, engine, runner)
            await whole.run(length, line)
            for entry in engine.records("t"):
                engine.forget("t", entry.id)
            return whole.sources

    return asyncio.run(run())


def plain(kept: str, max_tokens: int, suffix: int, **fields: object) -> Generation:
    usual = {"n": 1, "stops": False, "choice": 0, "place": "end", "part": 0.0}
    return Generation(kept=kept, max_tokens=max_tokens, suffix=suffix, **(usual | fields))  # type: ignore[arg-type]


@settings(max_examples=120)
@example(setup=replace(AMPLE, pipelined=False), length=3, line=[plain("running", 8, 3), plain("warm", 4, 0)])
@example(setup=replace(AMPLE, chunk=3), length=20, line=[plain("running", 8, 2, place="last"), plain("leased", 4, 0)])
@given(
    setup=setups,
    length=st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 20]),
    line=st.lists(generations, min_size=1, max_size=6),
)
def test_a_line_of_continuations_is_one_of_fresh_requests(setup: Setup, length: int, line: list[Generation]) -> None:
    run_line(setup, length, line)


def test_leases_are_served_from_blocks_and_from_the_host() -> None:
    line = [plain("leased", 5, 3)] * 6
    assert run_line(AMPLE, 17, line) == ["blocks"] * 5
    assert "host" in run_line(TINY, 17, line)


def parents_around_a_boundary() -> list[tuple[int, int]]:
    return [(length, count) for length in (1, 2, 3, 4, 5, 8) for count in range(6)]


def test_every_length_and_suffix_around_a_block_boundary() -> None:
    """All of them at once, in one engine: lengths of the parent, tokens it samples, suffixes, branches."""

    async def run(setup: Setup) -> None:
        async with running(setup) as (engine, runner):
            line = Line(setup, engine, runner)
            for length, count in parents_around_a_boundary():
                parent = line.ask_for([100 + length] * length, plain("leased", count, 0), None)
                await line.check_answer(parent)
                tokens = engine.parent("t", parent.id).choices[0].token_ids
                for at, suffix in ((a, s) for a in {1, length, len(tokens) - 1, len(tokens)} - {0} for s in (0, 1, 4)):
                    prompt = [*tokens[:at], *range(700, 700 + suffix)]
                    await line.check_answer(line.ask_for(prompt, plain("warm", 3, 0), Lineage(parent.id, 0, at)))
                engine.forget("t", parent.id)

    for setup in (AMPLE, replace(TINY, pipelined=False, prefix_caching=False)):
        asyncio.run(run(setup))
