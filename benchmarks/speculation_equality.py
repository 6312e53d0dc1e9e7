"""Random requests with drafts and without: every token, log-probability, hidden state and end must be the same.

    python -m benchmarks.speculation_equality [--model DIR] [--tokens 100000] [--seed 0] [--methods ngram suffix ...]
                                              [--device cuda]

Requests are drawn: sampling, penalties, biases, bad words, stops, grammars, catalogues, several choices, hidden states,
priorities, tenants, leases and their children. They come in a crowd to a cache so small that it preempts and swaps.
The same requests are answered without drafts first, then with each method:

    ngram        what followed the same tokens in the request
    suffix       there, or in what the tenant's records say
    prediction   the client's own: the answer, with mistakes
    draft        what the model itself says, as its own draft model
    eagle3       what a head says; --draft-model names it
    mtp          what the head of the model's own checkpoint says

The model is a tiny Llama with random weights, or a decoder of your own. Ends with an error where anything differs.
On a GPU sums depend on how many rows a step has: log-probabilities and states are not compared there, and one answer of
a hundred may have met a tie.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from bequest.engine.build import Built, build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.constraints.grammar import Grammar, GrammarSource, Vocabulary
from bequest.engine.drafting.choice import ChosenDrafter
from bequest.engine.errors import InsufficientRetention, InvalidRequest
from bequest.engine.scheduling.policy.tuning import Tuning
from bequest.engine.types import Lineage, OutputMode, Request, Retain, SamplingParams, Terms
from bequest.engine.types.catalogue import Catalogue
from bequest.engine.types.hidden import HiddenStatesParams
from bequest.engine.types.speculation import ON_CPU, DraftMethod, ModelDrafts, Speculation
from bequest.engine.watching.observation import RequestStats, StepStats

METHODS = ("ngram", "suffix", "prediction", "draft")
_BY_MODEL: dict[str, DraftMethod] = {"draft": "draft", "eagle3": "eagle3", "mtp": "mtp"}
MOST_LEN = 256
_TEXT = (Path(__file__).parent.parent / "LICENSE").read_text()  # which nobody edits: requests stay the same
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}
_SOURCES = [
    GrammarSource("json_schema", json.dumps(_PERSON)),
    GrammarSource("regex", "(the (block|step|plan),? ){2,40}"),
]


@dataclass(frozen=True)
class Job:
    """A request, and perhaps one that continues from what it says."""

    request: Request
    child: SamplingParams | None = None
    child_at: float = 1.0  # the part of the tokens that the child goes on behind
    wait: float = 0.0  # seconds before it comes


@dataclass(frozen=True)
class Said:
    """All that a client could see of a choice."""

    token_ids: tuple[int, ...]
    text: str
    end: tuple[object, object]
    logprobs: object
    states: bytes = b""


Answers = dict[tuple[str, int], Said]


@dataclass
class Watcher:
    """Counts what a run did."""

    counts: Counter[str] = field(default_factory=Counter)

    def on_step(self, stats: StepStats) -> None:
        self.counts["tokens"] += stats.generated_tokens
        self.counts["drafted"] += stats.drafted_tokens
        self.counts["accepted"] += stats.accepted_tokens
        self.counts["preempted"] += stats.preempted
        self.counts["swapped"] += stats.swapped_in

    def on_finish(self, stats: RequestStats) -> None:
        self.counts["requests"] += 1


# --- drawing -------------------------------------------------------------------------------------------------------


class Drawer:
    def __init__(self, seed: int, built: Built) -> None:
        self._draw = random.Random(seed)
        self._tokenizer = built.text.tokenizer
        info = built.engine.info
        vocabulary = Vocabulary(self._tokenizer, info.vocab_size, info.eos_token_ids)
        self._grammars = [Grammar(source, vocabulary) for source in _SOURCES]
        self._text = self._tokenizer.encode(_TEXT, add_special_tokens=False)
        items = {tuple(self._text[i : i + 6]) for i in range(0, 600, 6)}
        self._catalogue = Catalogue(np.asarray(sorted(items), np.int32), info.vocab_size)

    def jobs(self, num_tokens: int) -> list[Job]:
        """Of so many tokens, if none ended early."""
        jobs: list[Job] = []
        while num_tokens > 0:
            job = self._job(len(jobs))
            if jobs and self._draw.random() < 0.2:  # what was asked before is asked again
                job = replace(job, request=replace(self._draw.choice(jobs).request, id=job.request.id))
            child = 0 if job.child is None else job.child.max_tokens
            num_tokens -= job.request.params.max_tokens * job.request.params.n + child
            jobs.append(job)
        return jobs

    def _job(self, number: int) -> Job:
        draw = self._draw
        params, prompt = self._params(), self._prompt()
        child = self._params(n=1, most=40) if draw.random() < 0.25 else None
        retain = Retain(60.0) if child is not None and draw.random() < 0.5 else None
        plain = params.catalogue is None and params.grammar is None
        states = HiddenStatesParams((1, 3), "all") if plain and draw.random() < 0.1 else None
        request = Request(
            f"job-{number}",
            draw.choice(["a", "a", "b"]),
            tuple(prompt),
            params,
            priority=draw.choice([0, 0, 0, 1]),
            output=OutputMode.FINAL,
            terms=Terms(retain=retain),
            hidden_states=states,
        )
        return Job(request, child, draw.choice([1.0, 1.0, 0.5]), draw.choice([0.0, 0.0, 0.2]))

    def _prompt(self) -> list[int]:
        draw, begin = self._draw, self._draw.randrange(len(self._text) - 100)
        copied = self._text[begin : begin + draw.randint(3, 60)]
        if draw.random() < 0.5:  # it has begun to say it again
            return copied + copied[: draw.randint(1, len(copied))]
        return copied

    def _params(self, n: int | None = None, most: int = 90) -> SamplingParams:
        draw = self._draw
        params = SamplingParams(
            max_tokens=draw.randint(1, most),
            n=n or draw.choice([1, 1, 1, 2, 3]),
            temperature=draw.choice([0.0, 0.0, 0.4, 1.0]),
            top_p=draw.choice([1.0, 0.9]),
            top_k=draw.choice([0, 0, 40]),
            min_p=draw.choice([0.0, 0.0, 0.05]),
            seed=draw.randrange(1000),
            ignore_eos=draw.random() < 0.7,
            logprobs=draw.choice([None, None, 0, 3]),
        )
        rules = [self._rules(params) for _ in range(draw.choice([0, 0, 1, 2]))]
        for rule in rules:
            params = replace(params, **rule)
        return params

    def _rules(self, params: SamplingParams) -> dict[str, object]:
        """One more thing that a request may ask for."""
        draw, text = self._draw, self._text
        words = [tuple(text[i : i + draw.randint(1, 3)]) for i in draw.sample(range(len(text) - 9), 20)]
        rules: list[dict[str, object]] = [
            {"presence_penalty": 0.6, "frequency_penalty": 0.3},
            {"repetition_penalty": 1.2},
            {"logit_bias": tuple((word[0], draw.uniform(-4, 2)) for word in words)},
            {"bad_words": tuple(words)},
            {"stop": draw.choice([(" the",), (".", "\n\n"), ("block",)])},
            {"stop_token_ids": frozenset(word[0] for word in words[:4]), "min_tokens": params.max_tokens // 2},
            {"allowed_token_ids": tuple(sorted({*text[:400]}))},
        ]
        alone: list[dict[str, object]] = [
            {"grammar": draw.choice(self._grammars), "catalogue": None},
            {"catalogue": self._catalogue, "grammar": None},
        ]
        if params.grammar is None and params.catalogue is None and not params.min_tokens:
            rules += [{**rule, **_NO_OTHER_RULES} for rule in alone]
        if params.grammar is not None or params.catalogue is not None:  # what excludes might leave nothing
            rules = rules[:3]
        return draw.choice(rules)


_NO_OTHER_RULES: dict[str, object] = {"allowed_token_ids": None, "bad_words": (), "min_tokens": 0}


# --- running -------------------------------------------------------------------------------------------------------


def config_of(
    model: str, device: Literal["cpu", "cuda"], draft_model: str | None, strips: int, speculative: str = "auto"
) -> EngineConfig:
    """A cache for two of the longest, where sixteen may run."""
    return EngineConfig(
        model=model,
        draft_model=draft_model,
        speculative=speculative,
        device=device,
        dtype="float32",
        max_model_len=MOST_LEN,
        max_num_seqs=16,
        block_size=16,
        num_blocks=1 + 2 * strips * MOST_LEN // 16,
        host_cache_gb=0.001,
    )


async def answers_of(jobs: list[Job], built: Built, method: str, before: Answers | None = None) -> Answers:
    """`before`: what is predicted of the answers."""
    limit = asyncio.Semaphore(24)
    answers: Answers = {}

    async def work(job: Job, number: int) -> None:
        async with limit:
            await asyncio.sleep(job.wait)
            wish = _speculation(method, number, before, job.request.id)
            fine = await _ask(built, replace(job.request, speculation=wish), answers)
            if fine and job.child is not None:
                child = _child_of(job, built)
                wish = _speculation(method, number, before, child.id)
                await _ask(built, replace(child, speculation=wish), answers)

    await asyncio.gather(*(work(job, number) for number, job in enumerate(jobs)))
    return answers


def _speculation(method: str, number: int, before: Answers | None, request_id: str) -> Speculation:
    if method == "off":
        return Speculation(method="off")
    most = [None, None, 1, 3, 16][number % 5]
    if method == "suffix":
        return Speculation(method="suffix", most=most)
    if method in _BY_MODEL:
        return Speculation(method=_BY_MODEL[method], most=most)
    if method == "prediction" and before is not None and (request_id, 0) in before:
        tokens = [*before[request_id, 0].token_ids]
        for place in range(7, len(tokens), 11):
            tokens[place] = tokens[place // 2]
        return Speculation(most=most, prediction=tuple(tokens))
    return Speculation(method="ngram", most=most)


def _child_of(job: Job, built: Built) -> Request:
    """Goes on behind the parent's last token, or somewhere in the middle."""
    assert job.child is not None
    parent, said = job.request, built.engine.parent(job.request.tenant, job.request.id).choices[0].token_ids
    at = max(1, int(len(said) * job.child_at))
    prompt = (*said[:at], *parent.prompt_token_ids[:5])[: MOST_LEN - job.child.max_tokens]
    lineage = Lineage(parent.id, 0, min(at, len(prompt)))
    terms = Terms(lineage=lineage)
    return Request(f"{parent.id}-child", parent.tenant, prompt, job.child, output=OutputMode.FINAL, terms=terms)


async def _ask(built: Built, request: Request, answers: Answers) -> bool:
    """Whether there is an answer. Rules that leave nothing to say are an end too."""
    try:
        await _listen(built, request, answers)
    except InsufficientRetention:  # a matter of who else has a lease now
        return await _ask(built, replace(request, terms=replace(request.terms, retain=None)), answers)
    except InvalidRequest as error:
        answers[request.id, 0] = Said((), "", ("error", str(error)), None)
        return False
    return True


async def _listen(built: Built, request: Request, answers: Answers) -> None:
    async for delta in built.engine.generate(request):
        found = () if delta.hidden_states is None else delta.hidden_states.choices
        states = {choice.index: choice.assemble().tobytes() for choice in found}
        for choice in delta.choices:
            end = (choice.finish_reason, choice.stop_reason)
            said = Said(choice.token_ids, choice.text, end, choice.logprobs, states.get(choice.index, b""))
            answers[request.id, choice.index] = said


def differences(plain: Answers, drafted: Answers, *, exact: bool) -> list[str]:
    """What a client would notice. Not `exact`: of the tokens and the ends."""
    assert plain.keys() == drafted.keys()

    def seen(said: Said) -> Said:
        return said if exact else replace(said, logprobs=None, states=b"")

    return [f"{key[0]} choice {key[1]}" for key, said in plain.items() if seen(said) != seen(drafted[key])]


async def compare(
    model: str,
    num_tokens: int,
    seed: int,
    methods: tuple[str, ...],
    device: Literal["cpu", "cuda"] = "cpu",
    draft_model: str | None = None,
    strips: int = 1,
) -> dict[str, Counter[str]]:
    """What each run did. Raises AssertionError where an answer differs. `strips`: blocks of the model's cache that hold
    a token, of which one with sliding windows has several."""
    counts: dict[str, Counter[str]] = {}
    plain: Answers = {}
    for method in ("off", *methods):
        watcher, began = Watcher(), time.perf_counter()
        beside = (draft_model or model) if method in ("draft", "eagle3") else None
        own = "mtp" if method == "mtp" else "auto"
        config = config_of(model, device, beside, strips, own)
        built = await build_engine(config, watcher, tuning=Tuning(draft_rows=64))
        if method in _BY_MODEL:  # it costs as much as the model, and drafts all the same
            drafts = ModelDrafts(method=_BY_MODEL[method], costs=ON_CPU)
            built.engine.scheduler.drafter = ChosenDrafter(drafts.method, replace(ON_CPU, model=drafts))
        try:
            jobs = Drawer(seed, built).jobs(num_tokens)
            answers = await answers_of(jobs, built, method, plain)
        finally:
            await built.engine.stop()
        plain = plain or answers
        wrong = differences(plain, answers, exact=device == "cpu")
        ties = 0 if device == "cpu" else len(plain) // 100
        assert len(wrong) <= ties, f"{method} changed {len(wrong)} answers: {wrong[:9]}"
        counts[method] = watcher.counts
        shown = "  ".join(f"{name} {number:,}" for name, number in watcher.counts.items())
        print(f"{method:>10}  {shown}  {time.perf_counter() - began:.0f} s", flush=True)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a directory; default: a tiny random one, made in a temporary folder")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="+", choices=(*METHODS, "eagle3", "mtp"), default=METHODS)
    parser.add_argument("--draft-model", help="for draft and eagle3; default: the model itself")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(_save_tiny(Path(folder) / "llama"))
        asyncio.run(
            compare(model, options.tokens, options.seed, tuple(options.methods), options.device, options.draft_model)
        )
    print("all answers are the same")


def _save_tiny(path: Path) -> Path:
    from tests.tiny_models import save_tiny_model  # transformers takes seconds to import

    return save_tiny_model("llama", path)


if __name__ == "__main__":
    main()
