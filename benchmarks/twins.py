"""A crowded server with little memory beside one that computes each request afresh, alone: do they answer the same?

    python -m benchmarks.twins [MODEL] [--requests 1000] [--clients 10] [--seed 0] [--adapters 0] [--kills 0]
                               [--flags "…"] [--both "…"]

Requests of the first server sample with all kinds of parameters, follow grammars, search with beams, score suffixes and
extract hidden states. Half of them continue what an earlier one left, from its end or from somewhere in it, or what
still runs. Some are leased, some streamed, some clients leave early, records are deleted, or leave as estates and come
back. Its cache is small, so that it preempts, evicts and swaps. Then each request that was answered is sent to the
second server with all of its tokens. It keeps nothing and has room for everything. Tokens, texts, log-probabilities,
scores and states are compared. When everything is deleted the first server must hold nothing.

MODEL is a directory; without it a small random one is made. Where it sees, half of the requests are chats with images,
some of which come again; where it has an encoder each has one of a few inputs. --adapters: files of random adapters.
The first server has three of them under names that stand for others in the middle of the load. --kills: so often it is
killed with SIGKILL and started again; half of its leases are durable, and those that were promised must be found.

--flags are the first server's, such as `--speculative ngram`; --both those that change numbers, such as
`--kv-cache-dtype fp8`. Exits with 1 if an answer differs, if a request gets a 5xx or no answer, if a lease is lost or
kept too long, or if a server ends.
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
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.fuzz.values import WORDS
from benchmarks.model_shapes import SHAPES, write_model
from benchmarks.random_adapters import write_adapter, write_adapter_of
from benchmarks.soaking import PATIENCE, SHAPE, Process, Score, code_of, forget_all, metrics_of
from benchmarks.twin_requests import Adapters, Asked, Body, Maker, Sent

MAX_LEN = 256
_LONGEST_ANSWER = 50
_BOTH = ["--port", "0", "--threads", "1", "--max-model-len", str(MAX_LEN)]
_CROWDED = ["--block-size", "4", "--num-blocks", "150", "--max-num-seqs", "5", "--host-cache-gb", "0.001"]
_ROOMY = ["--block-size", "16", "--num-blocks", "800", "--max-num-seqs", "64", "--no-enable-prefix-caching"]
# Of a choice, where a server tells it.
_COMPARED = (
    *("token_ids", "text", "message", "finish_reason", "stop_reason", "beam_score", "cumulative_logprob"),
    *("logprobs", "prompt_logprobs", "hidden_states"),
)
_STREAMED = ("token_ids", "text", "finish_reason", "stop_reason")
_HELD = ("blocks_used", "host_blocks_used", "retention_charged_blocks", "leases")
_IDLE = (*(f"bequest:{name}" for name in _HELD), "vllm:num_requests_running", "vllm:num_requests_waiting")
_LOST = ("continuation_parent_not_found", "continuation_parent_lost", "continuation_parent_expired")
_KEY = "sk-one-of-the-twins"
_KEYS = f"""
[[keys]]
name = "twin"
tenant = "twin"
key = "{_KEY}"
operator = true
lowest_priority = -1
permissions = ["estates"]
"""
_NEAR = 2e-3  # of numbers; sums of different steps have different last bits


class Crowded:
    """The server that is loaded. It may be killed, and is started again on its files."""

    def __init__(self, arguments: list[str], folder: Path, adapters: dict[str, int]) -> None:
        self._arguments = arguments
        self._folder = folder
        self.is_up = asyncio.Event()
        self.starts = 0
        self.start(adapters)

    def start(self, adapters: dict[str, int]) -> None:
        loras = [f"--lora={name}={self._folder}/adapters/{file}" for name, file in adapters.items()]
        self.process = Process([*self._arguments, *loras], self._folder / f"crowded{self.starts}.log")
        self.starts += 1
        self.is_up.set()

    async def kill(self, adapters: dict[str, int]) -> None:
        """With SIGKILL, and starts another one."""
        self.is_up.clear()
        await asyncio.to_thread(self.process.kill)
        await asyncio.sleep(0.5)  # clients hear of it
        await asyncio.to_thread(self.start, adapters)


class Twins:
    def __init__(self, session: aiohttp.ClientSession, crowded: Crowded, maker: Maker, score: Score) -> None:
        self.session = session
        self.crowded = crowded
        self.maker = maker
        self.score = score
        self.answered: list[tuple[Asked, Body]] = []
        self.to_send = 0
        self.promised: set[str] = set()  # leases that outlive the process

    async def crowd(self, requests: int, clients: int, kills: int) -> None:
        self.to_send = requests
        moments = {requests * (number + 1) // (kills + 1) for number in range(kills)}
        await asyncio.gather(*(self._client(moments) for _ in range(clients)))

    async def _client(self, moments: set[int]) -> None:
        """`moments`: how many requests are to be sent when the server is killed."""
        while self.to_send > 0:
            self.to_send -= 1
            if self.to_send in moments:
                self.score.seen["killed"] += 1
                await self.crowded.kill(self.maker.adapters.files)
            await self.crowded.is_up.wait()
            starts = self.crowded.starts
            try:
                await self._one(self.crowded.process.url)
                if self.maker.adapters.num_files and self.maker.draw.random() < 0.1:
                    await self._exchange(self.crowded.process.url)
            except aiohttp.ClientError:
                if self.crowded.starts == starts and self.crowded.is_up.is_set():
                    raise
                self.score.seen["cut by a kill"] += 1

    async def _one(self, url: str) -> None:
        draw, asked = self.maker.draw, self.maker.request()
        name, parent = asked.crowded.body.get("model", ""), asked.parent
        leaves = draw.random() < 0.06
        self.maker.adapters.open.append(name)
        try:
            patience = 0.1 * draw.random() if leaves else PATIENCE
            answer = await asyncio.wait_for(self._ask(url, asked.crowded), patience)
        except TimeoutError:
            self.score.seen["left early"] += leaves
            if not leaves:
                self.score.fault(f"no answer in {PATIENCE:g} s: {json.dumps(asked.crowded.body)}")
            return
        finally:
            self.maker.adapters.open.remove(name)
            self.maker.running.pop(asked.crowded.body.get("request_id", ""), None)
        if isinstance(answer, dict):
            self._note(asked, answer)
        elif parent in self.promised and answer in _LOST:
            self.score.fault(f"{answer}, which was promised: {json.dumps(asked.crowded.body)[:600]}")
        elif self.maker.left and answer == "insufficient_retention":
            for left in draw.choices(self.maker.left, k=5):
                await self._release(url, left.id)
        if self.maker.left and draw.random() < 0.02:
            await self._delete(url, draw.choice(self.maker.left).id)
        if self.maker.left and draw.random() < 0.03:
            await self._travel(url, draw.choice(self.maker.left).id)

    def _note(self, asked: Asked, answer: Body) -> None:
        self.answered.append((self.maker.remember(asked, answer), answer))
        if (answer.get("retained") or {}).get("durable"):
            self.promised.add(answer["id"])
            self.score.seen["durable"] += 1
        if inherited := answer.get("continuation"):
            self.score.seen[f"continued from {inherited['source']}"] += 1

    async def _travel(self, url: str, lease: str) -> None:
        """It leaves as an estate, and comes back."""
        path = f"{url}/v1/continuations/{lease}"
        async with self.session.get(f"{path}/estate") as response:
            status, estate = response.status, await response.read()
        if status == 200:
            await self._delete(url, lease)
            ttl = self.maker.draw.choice([1, 30])
            async with self.session.put(f"{path}/estate", params={"ttl": ttl}, data=estate) as response:
                status, estate = response.status, await response.read()
        self.score.seen[f"travelled: {'' if status == 200 else code_of(estate.decode())}"] += 1
        if status >= 500 or status == 400:
            self.score.fault(f"an estate of {lease}: {status} {estate[:300]!r}")

    async def _delete(self, url: str, lease: str) -> None:
        self.promised.discard(lease)
        async with self.session.delete(f"{url}/v1/continuations/{lease}"):
            self.score.seen["deleted"] += 1

    async def _release(self, url: str, lease: str) -> None:
        self.promised.discard(lease)
        async with self.session.patch(f"{url}/v1/continuations/{lease}", json={"ttl": None}):
            self.score.seen["released"] += 1

    async def _exchange(self, url: str) -> None:
        """A name stands for another file from now on, if nobody needs it."""
        adapters, draw = self.maker.adapters, self.maker.draw
        names = [name for name in adapters.files if name not in adapters.open]
        if not names:
            return
        name = draw.choice(names)
        file = adapters.files.pop(name)
        unload = Sent("/v1/unload_lora_adapter", {"lora_name": name})
        try:
            async with self.session.post(url + unload.path, json=unload.body) as response:
                refusal = await response.json() if response.status == 409 else None
            for lease in refusal["error"]["details"]["leases"] if refusal else []:
                await self._release(url, lease)
            if refusal is None or isinstance(await self._ask(url, unload), dict):
                file = draw.choice([each for each in range(adapters.num_files) if each not in adapters.files.values()])
                self.score.seen["exchanged"] += 1
                loaded = await self._ask(
                    url, Sent("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(file)})
                )
                if not isinstance(loaded, dict):
                    self.score.fault(f"{name} was not loaded: {loaded}")
        finally:
            adapters.files[name] = file

    async def compare(self, url: str) -> None:
        for asked, answer in self.answered:
            fresh = await self._fresh(url, asked)
            if fresh is None:
                continue
            names = _STREAMED if asked.crowded.body.get("stream") else _COMPARED
            told, expected = _shown(answer, names), _shown(fresh, names)
            self.score.seen[f"compared, of {asked.origin}"] += 1
            if not _is_near(told, expected):
                shown = (json.dumps(part)[:600] for part in (asked.crowded.body, told, expected))
                self.score.fault("of {}: {}\n  crowded {}\n  afresh  {}".format(asked.origin, *shown))

    async def _fresh(self, url: str, asked: Asked) -> Body | None:
        """What the roomy server says, which forgets it then. None: nothing."""
        fresh: Body = {}
        for sent in asked.fresh():
            place = {"continuation_of": fresh["id"]} if fresh else {}
            answer = await self._ask(url, Sent(sent.path, {**sent.body, **place}))
            if isinstance(answer, str):
                return None
            fresh = answer
        if len(asked.fresh()) > 1:
            await forget_all(self.session, url)
        return fresh

    async def _ask(self, url: str, sent: Sent) -> Body | str:
        """The answer, put together if it comes in pieces; the code of an error, which is counted."""
        async with self.session.post(url + sent.path, json=sent.body) as response:
            status, text = response.status, await response.text()
        if status == 200 and sent.body.get("stream"):
            events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
            failed = next((event for event in events if "error" in event), None)
            if failed is None:
                return _joined(events)
            status, text = 400, json.dumps(failed)
        if status == 200:
            answer: Body = json.loads(text) if text.startswith("{") else {}
            return answer
        code = code_of(text)
        self.score.seen[f"{status} {code}"] += 1
        if status >= 500:
            self.score.fault(f"{status} {text[:300]} of {json.dumps(sent.body)[:600]}")
            self.to_send = 0
        return code


def _joined(events: list[Body]) -> Body:
    """The answer that a stream's chunks are parts of."""
    choices: dict[int, Body] = {}
    for part in (part for event in events for part in event["choices"]):
        choice = choices.setdefault(part["index"], {"text": "", "token_ids": []})
        choice["text"] += part["text"]
        choice["token_ids"] += part.get("token_ids") or []
        choice |= {name: part.get(name) for name in ("finish_reason", "stop_reason") if part.get("finish_reason")}
    told = {name: event[name] for event in events for name in ("retained", "continuation") if event.get(name)}
    return {"id": events[0]["id"], "choices": [choices[index] for index in sorted(choices)], **told}


def _shown(answer: Body, names: tuple[str, ...]) -> list[Any]:
    if "choices" not in answer:
        return [entry.get("data") or entry["embedding"] for entry in answer["data"]]
    return [{name: choice.get(name) for name in names} for choice in answer["choices"]]


def _is_near(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_NEAR, abs_tol=_NEAR)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_near, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_near(value, other[name]) for name, value in one.items())
    return bool(one == other)


async def run(crowded: Crowded, roomy: str, adapters: Adapters, options: argparse.Namespace, score: Score) -> None:
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    headers = {"Authorization": f"Bearer {_KEY}"}
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers) as session:
        maker = await make_maker(session, crowded.process.url, adapters, options)
        twins = Twins(session, crowded, maker, score)
        try:
            await twins.crowd(options.requests, options.clients, options.kills)
            await check_idle(session, crowded.process.url, score)
            await twins.compare(roomy)
        except aiohttp.ClientError as error:
            score.fault(f"a server closed its connection: {error!r}")


async def make_maker(
    session: aiohttp.ClientSession, url: str, adapters: Adapters, options: argparse.Namespace
) -> Maker:
    async with session.post(f"{url}/tokenize", json={"prompt": " ".join(WORDS)}) as response:
        tokens = sorted(set((await response.json())["tokens"]))
    async with session.get(f"{url}/v1/models") as response:
        most = (await response.json())["data"][0]["max_model_len"]
    body = {"prompt": "one", "max_tokens": 0, "return_token_ids": True}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        choice = (await response.json())["choices"][0]
    return Maker(
        random.Random(options.seed),
        tokens,
        max(most - _LONGEST_ANSWER, most // 2),
        adapters,
        begin=choice["prompt_token_ids"][:1] if choice.get("encoder_prompt_token_ids") else None,
        sees=options.model is not None and (options.model / "preprocessor_config.json").exists(),
        durable=options.kills > 0,
    )


async def check_idle(session: aiohttp.ClientSession, url: str, score: Score) -> None:
    """When everything is deleted nothing may be held."""
    await forget_all(session, url)
    for _ in range(100):
        figures = await metrics_of(session, url)
        held = {name: value for name, value in figures.items() if name in _IDLE and value}
        if not held:
            return
        await asyncio.sleep(0.1)
    score.fault(f"held when idle: {held}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flags", type=shlex.split, default=[], help="of the crowded server")
    parser.add_argument("--both", type=shlex.split, default=[], help="flags of both servers")
    parser.add_argument("--kills", type=int, default=0, help="of the crowded server, which keeps leases in files")
    parser.add_argument("--adapters", type=int, default=0, help="files of random ones")
    options = parser.parse_args()
    score = Score()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = [str(options.model or write_model(SHAPE, folder / "model")), *_BOTH, *options.both]
        model += [] if options.model else ["--load-format", "dummy"]
        for file in range(options.adapters):
            directory, rank = folder / "adapters" / str(file), 1 + 3 * file
            if options.model:
                write_adapter_of(directory, options.model, rank, seed=file)
            else:
                write_adapter(directory, SHAPES[SHAPE].config, rank, seed=file, size=0.3)
        (folder / "keys.toml").write_text(_KEYS)
        ours = ["--api-key-file", str(folder / "keys.toml")]
        ours += ["--allow-lora-loading", str(folder / "adapters")] if options.adapters else []
        ours += ["--estate-dir", str(folder / "estates"), "--estate-gb", "1"] if options.kills else []
        theirs = [f"--lora=file{file}={folder}/adapters/{file}" for file in range(options.adapters)]
        adapters = Adapters(options.adapters)
        crowded = Crowded([*model, *_CROWDED, *ours, *options.flags], folder, adapters.files)
        roomy = Process([*model, *_ROOMY, *theirs], folder / "roomy.log")
        try:
            asyncio.run(run(crowded, roomy.url, adapters, options, score))
        finally:
            crowded.process.end(score)
            roomy.end(score)
    score.show()
    sys.exit(1 if score.faults else 0)


if __name__ == "__main__":
    main()
