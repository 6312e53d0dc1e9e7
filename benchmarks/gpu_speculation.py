"""What drafts bring on a GPU: tokens per second with them by those without, by turns, of a model with random weights.

    python -m benchmarks.gpu_speculation [--shape llama-3.1-8b] [--tokens 384] [--rounds 3] [--json FILE]

A model with random weights copies nothing by itself. So answers that should say something are held to it, by a
catalogue of one item: of the copy it is a text of the prompt, with another token in every twentieth place. What is
always right and what is always wrong is a drafter that knows the answer; its length and its rests are those of every
drafter.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.model_shapes import SHAPES, write_model
from bequest.engine._C import TokenList
from bequest.engine.build import Built, build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.drafting.ngrams import NgramGuesses
from bequest.engine.state.sequence import Sequence as Choice
from bequest.engine.types import OutputMode, Request, SamplingParams
from bequest.engine.types.catalogue import Catalogue
from bequest.engine.types.speculation import MOST_DRAFTED, DraftCosts, DraftMethod, Speculation
from bequest.engine.watching.observation import StepStats

_numbers = itertools.count()
_EDITED = 20  # one token of so many is another one


@dataclass
class Drafted:
    """An Observer."""

    drafted: int = 0
    accepted: int = 0
    steps: int = 0

    def on_step(self, stats: StepStats) -> None:
        self.drafted += stats.drafted_tokens
        self.accepted += stats.accepted_tokens
        self.steps += 1

    def on_finish(self, stats: object) -> None:
        pass


class KnownAnswers:
    """A Drafter that knows what is going to be said, by request, and tells it or something else."""

    def __init__(self, answer: Sequence[int], costs: DraftCosts, *, right: bool, most: int = MOST_DRAFTED) -> None:
        self._answer = [token if right else token ^ 1 for token in answer]
        self._costs = costs
        self._most = most

    def guesses_of(self, sequence: Choice) -> KnownGuesses | None:
        if sequence.group.request.speculation.method == "off":
            return None
        return KnownGuesses(self._answer, sequence.num_prompt, self._most, self._costs)


class KnownGuesses(NgramGuesses):
    def __init__(self, answer: Sequence[int], num_prompt: int, most: int, costs: DraftCosts) -> None:
        super().__init__(num_prompt, (), most, costs)
        self._answer, self._num_prompt = answer, num_prompt

    def _find(self, tokens: TokenList, most: int) -> tuple[int, ...]:
        said = len(tokens) - self._num_prompt
        return tuple(self._answer[said : said + most])


@dataclass(frozen=True)
class Trial:
    """Requests that come at once, each with a prompt of its own."""

    prompts: list[tuple[int, ...]]
    num_tokens: int
    catalogues: list[Catalogue | None] = field(default_factory=list)

    def requests(self, method: DraftMethod | None) -> list[Request]:
        made = []
        for number, prompt in enumerate(self.prompts):
            catalogue = self.catalogues[number] if self.catalogues else None
            params = SamplingParams(
                max_tokens=self.num_tokens, temperature=0, ignore_eos=catalogue is None, catalogue=catalogue
            )
            made.append(
                Request(
                    f"speculation-{next(_numbers)}",
                    "benchmark",
                    prompt,
                    params,
                    output=OutputMode.DELTA,
                    speculation=Speculation(method=method),
                )
            )
        return made


async def run(built: Built, requests: list[Request]) -> tuple[list[list[int]], float]:
    """What they said, and tokens per second from the time that all had their first."""
    said: list[list[int]] = [[] for _ in requests]
    began: list[float] = []
    at_first = 0

    async def one(number: int, request: Request) -> None:
        nonlocal at_first
        async for delta in built.engine.generate(request):
            for choice in delta.choices:
                if choice.token_ids and not said[number]:
                    began.append(time.perf_counter())
                    at_first = sum(map(len, said)) + len(choice.token_ids)
                said[number] += choice.token_ids

    await asyncio.gather(*(one(i, request) for i, request in enumerate(requests)))
    seconds = time.perf_counter() - max(began)
    return said, (sum(map(len, said)) - at_first) / seconds


async def compare(built: Built, watcher: Drafted, name: str, trial: Trial, rounds: int) -> float:
    best: dict[DraftMethod, float] = {"off": 0.0, "ngram": 0.0}
    same = total = 0
    shares: list[str] = []
    for _ in range(rounds):
        answers = {}
        for method in best:
            before = watcher.drafted, watcher.accepted, watcher.steps
            answers[method], reached = await run(built, trial.requests(method))
            best[method] = max(best[method], reached)
        drafted, accepted = watcher.drafted - before[0], watcher.accepted - before[1]
        shares.append(f"{accepted}/{drafted} in {watcher.steps - before[2]} steps")
        pairs = zip(answers["off"], answers["ngram"], strict=True)
        same, total = same + sum(a == b for a, b in pairs), total + len(trial.prompts)
    ratio = best["ngram"] / best["off"]
    print(
        f"{name:>24} {best['off']:9.1f} {best['ngram']:9.1f} {ratio:6.2f}   {shares[-1]}, {same}/{total} the same",
        flush=True,
    )
    return ratio


class Drawer:
    """Of random tokens."""

    def __init__(self, vocab: int) -> None:
        self._draw = random.Random(7)
        self._vocab = vocab

    def tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(1000, self._vocab) for _ in range(count)]

    def story(self, count: int, num_tokens: int) -> Trial:
        return Trial([tuple(self.tokens(512)) for _ in range(count)], num_tokens)

    def told(self, answer: list[int]) -> Trial:
        """One stream that says so, and has nothing of it in its prompt."""
        return Trial([tuple(self.tokens(512))], len(answer), [self._only(answer)])

    def _only(self, answer: list[int]) -> Catalogue:
        return Catalogue(np.asarray([answer], np.int32), self._vocab)

    def copy(self, count: int, num_tokens: int) -> Trial:
        prompts, catalogues = [], []
        for _ in range(count):
            text = self.tokens(num_tokens)
            edited = [*text]
            edited[_EDITED - 1 :: _EDITED] = self.tokens(num_tokens // _EDITED)
            prompts.append((*self.tokens(64), *text, *self.tokens(16)))
            catalogues.append(self._only(edited))
        return Trial(prompts, num_tokens, catalogues)


async def measure(shape: str, num_tokens: int, rounds: int) -> dict[str, float]:
    ratios, watcher = {}, Drafted()
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            model=str(write_model(shape, Path(folder) / shape)),
            load_format="dummy",
            max_model_len=2048,
            max_num_seqs=256,
            speculative="ngram",
        )
        built = await build_engine(config, watcher)  # type: ignore[arg-type]
    draw = Drawer(built.engine.info.vocab_size)
    answer = draw.tokens(num_tokens)
    told = draw.told(answer)
    await run(built, told.requests("off"))  # the first one warms up

    async def note(name: str, trial: Trial) -> None:
        ratios[name] = await compare(built, watcher, name, trial, rounds)

    costs = built.engine.info.drafts
    assert costs is not None
    print(f"a step that waits for its drafts takes {costs.check:.2f} more; one that checks 0, 1, …:", end=" ")
    print(" ".join(f"{cost:.2f}" for cost in costs.steps), flush=True)
    print(f"{'trial':>24} {'without':>9} {'with':>9}  ratio   (tokens per second)", flush=True)
    drafter = built.engine.scheduler.drafter
    doubles: dict[str, Callable[[], KnownAnswers]] = {
        "right, k = 4": lambda: KnownAnswers(answer, costs, right=True, most=4),
        "right, k = 7": lambda: KnownAnswers(answer, costs, right=True, most=7),
        "right, k = 15": lambda: KnownAnswers(answer, costs, right=True, most=15),
        "wrong": lambda: KnownAnswers(answer, costs, right=False),
    }
    for name, double in doubles.items():
        built.engine.scheduler.drafter = double()
        await note(name, told)
    built.engine.scheduler.drafter = drafter
    for count in (1, 4, 16, 64):
        await note(f"copy, {count} at once", draw.copy(count, num_tokens))
        await note(f"nothing to copy, {count}", draw.story(count, num_tokens))
    await built.engine.stop()
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.basicConfig(level="WARNING", format="%(message)s")
    ratios = asyncio.run(measure(options.shape, options.tokens, options.rounds))
    if options.json is not None:
        options.json.write_text(json.dumps(ratios, indent=1) + "\n")


if __name__ == "__main__":
    main()
