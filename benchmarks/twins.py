"""A crowded server with little memory beside one that computes each request afresh, alone: do they answer the same?

    python -m benchmarks.twins [MODEL] [--requests 1000] [--clients 10] [--seed 0] [--flags "…"] [--both "…"]

Requests of the first server sample with all kinds of parameters, follow grammars, search with beams, score suffixes and
extract hidden states. Half of them continue what an earlier one left, from its end or from somewhere in it. Some are
leased, some streamed, some clients leave early, and records are deleted. Its cache is small, so that it preempts,
evicts and swaps. Then each request that was answered is sent to the second server with all of its tokens. It keeps
nothing and has room for everything. Tokens, texts, log-probabilities, scores and states are compared.

MODEL is a directory; without it a small random one is made. --flags are the first server's, such as
`--speculative ngram`; --both those that change numbers, such as `--kv-cache-dtype fp8`. Exits with 1 if an answer
differs, if a request gets a 5xx or no answer, or if a server ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import shlex
import sys
import tempfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.fuzz.values import WORDS
from benchmarks.model_shapes import write_model
from benchmarks.soaking import PATIENCE, SHAPE, Process, Score, code_of

MAX_LEN = 256
_LONGEST = MAX_LEN - 50  # a prompt, so that an answer has room
_BOTH = ["--port", "0", "--threads", "1", "--max-model-len", str(MAX_LEN)]
_CROWDED = ["--block-size", "4", "--num-blocks", "150", "--max-num-seqs", "5", "--host-cache-gb", "0.001"]
_ROOMY = ["--block-size", "16", "--num-blocks", "800", "--max-num-seqs", "64", "--no-enable-prefix-caching"]
_REGEXES = ["[a-z ]{3,30}", "(ab|c)+d", "[0-9]{1,9}"]
# Of a choice, where a server tells it.
_COMPARED = ("token_ids", "text", "finish_reason", "stop_reason", "beam_score", "cumulative_logprob", "logprobs")
_COMPARED += ("prompt_logprobs", "hidden_states")
_STREAMED = ("token_ids", "text", "finish_reason", "stop_reason")
_NEAR = 2e-3  # of numbers; sums of different steps have different last bits

Body = dict[str, Any]


@dataclass(frozen=True)
class Left:
    """What an answered request left: the tokens of its prompt and of each choice."""

    id: str
    prompt: list[int]
    choices: list[list[int]]


@dataclass(frozen=True)
class Asked:
    path: str
    crowded: Body  # as the first server gets it
    fresh: Body  # the same with all tokens, for the second


class Maker:
    """Makes requests, half of them of what others left."""

    def __init__(self, draw: random.Random, tokens: list[int]) -> None:
        self.draw = draw
        self.left: deque[Left] = deque(maxlen=25)
        self._tokens = tokens
        self._begins = [self._some(draw.randrange(8, 100)) for _ in range(5)]  # of prompts

    def request(self) -> Asked:
        kind = self.draw.choice([self._generation] * 5 + [self._search] * 2 + [self._states, self._scores])
        place, prompt = self._place(may_add=kind != self._scores)
        fields = kind(prompt)
        key, path = ("input", "hidden_states") if kind == self._states else ("prompt", "completions")
        terms = self._terms() if kind in (self._generation, self._search) else {}
        if kind == self._generation and self.draw.random() < 0.3:
            terms["stream"] = True
        if place is not None:
            fields.pop("prompt_logprobs", None)  # which a continuation has not
        crowded = {key: prompt} if place is None else place
        return Asked(f"/v1/{path}", {**crowded, **fields, **terms}, {key: prompt, **fields})

    def _some(self, count: int) -> list[int]:
        return self.draw.choices(self._tokens, k=count)

    def _place(self, may_add: bool) -> tuple[Body | None, list[int]]:
        """Where a continuation begins, None for a request of its own, and all tokens of its prompt."""
        draw = self.draw
        if self.left and draw.random() < 0.5:
            parent = draw.choice(self.left)
            choice = draw.randrange(len(parent.choices))
            whole = [*parent.prompt, *parent.choices[choice]]
            at = draw.choice([len(whole), draw.randint(1, len(whole))])
            added = self._some(draw.choice([0, 0, 1, 2, 9, 30])) if may_add else []
            if at + len(added) <= _LONGEST:
                told: int | str = "last" if at == len(whole) else at
                place = {"continuation_of": parent.id, "continuation_choice": choice, "continuation_at": told}
                return place | ({"continuation_token_ids": added} if added else {}), [*whole[:at], *added]
        begin = draw.choice(self._begins)
        return None, [*begin[: draw.randint(1, len(begin))], *self._some(draw.choice([0, 1, 3, 17]))]

    def _terms(self) -> Body:
        """Which change no answer."""
        retain = self.draw.choice([None, None, True, {"ttl": 1}, {"ttl": 30}])
        priority = self.draw.choice([None, None, None, -1, 2])
        return {"retain": retain, "priority": priority}

    def _generation(self, prompt: list[int]) -> Body:
        draw = self.draw
        limit = draw.choice([0, 1, 2, 5, 17, 40])
        if limit == 0:
            return {"max_tokens": 0, "return_token_ids": True}
        fields = {"max_tokens": limit, "n": draw.choice([1, 1, 1, 2, 3]), "return_token_ids": True, "temperature": 0}
        if draw.random() < 0.6:
            fields |= {"temperature": draw.choice([0.7, 1.0]), "seed": draw.randrange(9999)}
            fields |= {"top_p": draw.choice([None, 0.8]), "top_k": draw.choice([None, 7])}
        chances: dict[str, Any] = {
            "repetition_penalty": 1.3,
            "presence_penalty": 0.7,
            "frequency_penalty": 0.7,
            "logit_bias": {str(token): bias for token, bias in zip(self._some(2), (3, -100), strict=True)},
            "logprobs": draw.choice([0, 3]),
            "prompt_logprobs": draw.choice([0, 2]),
            "stop_token_ids": self._some(4),
            "return_hidden_states": {"layers": [0, -1], "positions": "all"},
        }
        fields |= {name: value for name, value in chances.items() if draw.random() < 0.13}
        # A grammar that ends before the least number of tokens is an error.
        one = {"structured_outputs": {"regex": draw.choice(_REGEXES)}}, {"min_tokens": draw.randint(0, limit)}, {}
        return fields | draw.choices(one, [1, 1, 4])[0]

    def _search(self, prompt: list[int]) -> Body:
        draw = self.draw
        width = draw.choice([2, 3, 5])
        return {
            "use_beam_search": True,
            "beam_width": width,
            "n": draw.randint(1, width),
            "max_tokens": draw.choice([1, 3, 8, 15]),
            "length_penalty": draw.choice([0.5, 1.0, 2.0]),
            "early_stopping": draw.choice([False, True, "never"]),
            "stop_token_ids": self._some(draw.choice([0, 8])),
            "return_token_ids": True,
        }

    def _states(self, prompt: list[int]) -> Body:
        draw = self.draw
        # Of a continuation the positions that its parent computed are not at hand.
        return {"layers": draw.choice(["last", "all", [0, 1]]), "positions": "last", "encoding_format": "float"}

    def _scores(self, prompt: list[int]) -> Body:
        suffixes = [self._some(self.draw.randint(1, 5)) for _ in range(self.draw.randint(1, 4))]
        logprobs = self.draw.choice([0, 2])
        return {"max_tokens": 0, "continuation_suffixes": suffixes, "logprobs": logprobs, "return_token_ids": True}


class Twins:
    def __init__(self, session: aiohttp.ClientSession, maker: Maker, score: Score) -> None:
        self.session = session
        self.maker = maker
        self.score = score
        self.answered: list[tuple[Asked, Body]] = []
        self.to_send = 0

    async def crowd(self, url: str, requests: int, clients: int) -> None:
        self.to_send = requests
        await asyncio.gather(*(self._client(url) for _ in range(clients)))

    async def _client(self, url: str) -> None:
        draw = self.maker.draw
        while self.to_send > 0:
            self.to_send -= 1
            asked = self.maker.request()
            leaves = draw.random() < 0.06
            try:
                patience = 0.1 * draw.random() if leaves else PATIENCE
                answer = await asyncio.wait_for(self._ask(url, asked.path, asked.crowded), patience)
            except TimeoutError:
                self.score.seen["left early"] += leaves
                if not leaves:
                    self.score.fault(f"no answer in {PATIENCE:g} s: {json.dumps(asked.crowded)}")
                continue
            if answer is not None:
                self._remember(asked, answer)
            if self.maker.left and draw.random() < 0.02:
                async with self.session.delete(f"{url}/v1/continuations/{draw.choice(self.maker.left).id}"):
                    self.score.seen["deleted"] += 1

    def _remember(self, asked: Asked, answer: Body) -> None:
        self.answered.append((asked, answer))
        if "prompt" in asked.fresh and "continuation_suffixes" not in asked.fresh:
            choices = [choice.get("token_ids") or [] for choice in answer["choices"]]
            self.maker.left.append(Left(answer["id"], asked.fresh["prompt"], choices))

    async def compare(self, url: str) -> None:
        for asked, answer in self.answered:
            fresh = await self._ask(url, asked.path, asked.fresh)
            if fresh is None:
                continue
            names = _STREAMED if asked.crowded.get("stream") else _COMPARED
            told, expected = _shown(answer, names), _shown(fresh, names)
            self.score.seen["compared"] += 1
            if not _is_near(told, expected):
                shown = (json.dumps(part)[:600] for part in (asked.crowded, told, expected))
                self.score.fault("{}\n  crowded {}\n  afresh  {}".format(*shown))

    async def _ask(self, url: str, path: str, body: Body) -> Body | None:
        """The answer, put together if it comes in pieces; None: it was refused, which is counted."""
        async with self.session.post(url + path, json=body) as response:
            if response.status == 200 and body.get("stream"):
                text = await response.text()
                events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
                failed = next((event for event in events if "error" in event), None)
                if failed is None:
                    return _joined(events)
                status, text = 400, json.dumps(failed)
            else:
                status, text = response.status, await response.text()
        if status == 200:
            answer: Body = json.loads(text)
            return answer
        self.score.seen[f"{status} {code_of(text)}"] += 1
        if status >= 500:
            self.score.fault(f"{status} {text[:300]} of {json.dumps(body)[:600]}")
            self.to_send = 0
        return None


def _joined(events: list[Body]) -> Body:
    """The answer that a stream's chunks are parts of."""
    choices: dict[int, Body] = {}
    for part in (part for event in events for part in event["choices"]):
        choice = choices.setdefault(part["index"], {"text": "", "token_ids": []})
        choice["text"] += part["text"]
        choice["token_ids"] += part.get("token_ids") or []
        choice |= {name: part.get(name) for name in ("finish_reason", "stop_reason") if part.get("finish_reason")}
    return {"id": events[0]["id"], "choices": [choices[index] for index in sorted(choices)]}


def _shown(answer: Body, names: tuple[str, ...]) -> list[Any]:
    if "choices" not in answer:
        return [entry["data"] for entry in answer["data"]]
    return [{name: choice.get(name) for name in names} for choice in answer["choices"]]


def _is_near(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_NEAR, abs_tol=_NEAR)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_near, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_near(value, other[name]) for name, value in one.items())
    return bool(one == other)


async def run(urls: tuple[str, str], options: argparse.Namespace, score: Score) -> None:
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        async with session.post(f"{urls[0]}/tokenize", json={"prompt": " ".join(WORDS)}) as response:
            tokens = sorted(set((await response.json())["tokens"]))
        twins = Twins(session, Maker(random.Random(options.seed), tokens), score)
        try:
            await twins.crowd(urls[0], options.requests, options.clients)
            await twins.compare(urls[1])
        except aiohttp.ClientError as error:
            score.fault(f"a server closed its connection: {error!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flags", type=shlex.split, default=[], help="of the crowded server")
    parser.add_argument("--both", type=shlex.split, default=[], help="flags of both servers")
    options = parser.parse_args()
    score = Score()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = [str(options.model or write_model(SHAPE, folder / "model")), *_BOTH, *options.both]
        model += [] if options.model else ["--load-format", "dummy"]
        crowded = Process([*model, *_CROWDED, *options.flags], folder / "crowded.log")
        roomy = Process([*model, *_ROOMY], folder / "roomy.log")
        try:
            asyncio.run(run((crowded.url, roomy.url), options, score))
        finally:
            crowded.end(score)
            roomy.end(score)
    score.show()
    sys.exit(1 if score.faults else 0)


if __name__ == "__main__":
    main()
