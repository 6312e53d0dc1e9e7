"""Stage 2 of the two-stage job over HTTP: beams after a resident parent, free and bound to a catalogue, by turns.

    python -m benchmarks.beams_http --url http://127.0.0.1:8000 [--items 10000000] [--rounds 20] [--crowds 8 64]
    python -m benchmarks.beams_http --shape qwen3-0.6b                        # starts a server with random weights

A parent of 700 tokens is leased; a search of 32 beams × 3 tokens appends five tokens to it. A search is timed to the
last byte of its answer; beside each one that is bound to the catalogue another, not timed, gives the token ids, and
every item is checked. With --shape and a GPU, `transformers` searches the same model and prompt afterwards, if it is
installed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np

from benchmarks.http_load import start_server
from benchmarks.model_shapes import SHAPES, write_model

SUFFIX = [1001, 1002, 1003, 1004, 1005]
LOWEST, HIGHEST = 300, 30_000  # ordinary tokens of every vocabulary here
WIDTH, DEPTH = 32, 3
_CROWDS = 12  # of each size; the first does not count


async def ask(session: aiohttp.ClientSession, path: str, **body: Any) -> dict[str, Any]:
    async with session.post(path, json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


async def make_parent(url: str, retain: bool = False) -> str:
    """The id of an answer with 705 tokens, its prompt included."""
    prompt = np.random.default_rng(3).integers(LOWEST, HIGHEST, 700).tolist()
    async with aiohttp.ClientSession(url) as session:
        answer = await ask(session, "/v1/completions", prompt=prompt, max_tokens=5, ignore_eos=True, retain=retain)
    return str(answer["id"])


def search(parent: str, catalogue: str | None) -> dict[str, Any]:
    return {
        "continuation_of": parent,
        "continuation_token_ids": SUFFIX,
        "prompt": None,
        "use_beam_search": True,
        "n": WIDTH,
        "max_tokens": DEPTH,
        "ignore_eos": True,
        "catalogue": catalogue,
    }


class Connection:
    """A client that costs little: what is timed should be the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @staticmethod
    async def open(url: str) -> Connection:
        where = urlsplit(url)
        return Connection(*await asyncio.open_connection(where.hostname, where.port, limit=1 << 20))

    async def timed_search(self, parent: str, catalogue: str | None) -> float:
        """Seconds to the last byte of the answer."""
        body = json.dumps(search(parent, catalogue)).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        began = time.perf_counter()
        self._writer.write(head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        answered = await self._reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", answered.lower())
        assert length is not None, answered
        answer = await self._reader.readexactly(int(length[1]))
        seconds = time.perf_counter() - began
        assert len(json.loads(answer).get("choices", ())) == WIDTH, answer
        return seconds

    def close(self) -> None:
        self._writer.close()


async def timed_crowd(connections: list[Connection], parent: str) -> float:
    """Seconds until the last of them has its answer."""
    began = time.perf_counter()
    await asyncio.gather(*(connection.timed_search(parent, None) for connection in connections))
    return time.perf_counter() - began


async def found_items(session: aiohttp.ClientSession, parent: str) -> list[tuple[int, ...]]:
    answer = await ask(session, "/v1/completions", **search(parent, "bench"), return_token_ids=True)
    return [tuple(choice["token_ids"]) for choice in answer["choices"]]


def transformers_ms(shape: str, rounds: int = 5) -> float | None:
    """The same search by transformers on a GPU, from the whole prompt; None where it or a GPU is missing."""
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    fields = {key: value for key, value in SHAPES[shape].config.items() if key != "architectures"}
    config = AutoConfig.for_model(**fields)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    prompt = torch.randint(LOWEST, HIGHEST, (1, 705 + len(SUFFIX)), device="cuda")
    times = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            num_beams=WIDTH,
            num_return_sequences=WIDTH,
            max_new_tokens=DEPTH,
            min_new_tokens=DEPTH,
            do_sample=False,
            pad_token_id=0,
        )
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times[1:])


def random_items(count: int) -> np.ndarray:
    return np.random.default_rng(7).integers(LOWEST, HIGHEST, (count, DEPTH), dtype=np.int32)


async def measure(url: str, num_items: int, rounds: int, crowds: list[int]) -> dict[str, float]:
    limit = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=limit, timeout=aiohttp.ClientTimeout(300)) as session:
        items = random_items(num_items)
        ordered = np.sort(packed(items))
        began = time.perf_counter()
        headers = {"Content-Type": "application/octet-stream"}
        query = f"/v1/catalogues?name=bench&width={DEPTH}&replace=true"
        async with session.post(query, data=items.tobytes(), headers=headers) as response:
            assert response.status == 200, await response.text()
        upload = time.perf_counter() - began
        parent = await make_parent(url, retain=True)
        connections = [await Connection.open(url) for _ in range(max(crowds, default=1))]
        free, bound = [], []
        for number in range(rounds + 2):
            seconds = await connections[0].timed_search(parent, None)
            bound_seconds = await connections[0].timed_search(parent, "bench")
            found = await found_items(session, parent)
            assert found and all(is_member(ordered, item) for item in found), "an item that is not in the catalogue"
            if number >= 2:
                free.append(seconds)
                bound.append(bound_seconds)
        at_once = {num: [await timed_crowd(connections[:num], parent) for _ in range(_CROWDS)] for num in crowds}
        for connection in connections:
            connection.close()
    return {
        "upload_s": upload,
        "free_ms": 1e3 * statistics.median(free),
        "catalogue_ms": 1e3 * statistics.median(bound),
        "catalogue_over_free": statistics.median(bound) / statistics.median(free),
        **{f"crowd_of_{num}_ms": 1e3 * statistics.median(times[1:]) for num, times in at_once.items()},
    }


def packed(items: np.ndarray) -> np.ndarray:
    """int64 [rows], a number for each row of int32 [rows, DEPTH]: sorting rows themselves takes ten times as long."""
    numbers = np.zeros(len(items), np.int64)
    for column in items.T:
        numbers = numbers << 16 | column  # HIGHEST fits into 16 bits, DEPTH of them into 64
    return numbers


def is_member(ordered: np.ndarray, item: tuple[int, ...]) -> bool:
    number = packed(np.asarray([item], dtype=np.int32))[0]
    place = int(np.searchsorted(ordered, number))
    return place < len(ordered) and ordered[place] == number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--items", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--crowds", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--alone", action="store_true", help="without transformers")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        process, url = None, options.url
        if url is None:
            process, url, _ = start_server(write_model(options.shape, Path(folder) / options.shape))
        try:
            figures = asyncio.run(measure(url, options.items, options.rounds, options.crowds))
        finally:
            if process is not None:
                process.terminate()
                process.wait()
    theirs = None if options.url or options.alone else transformers_ms(options.shape)
    if theirs is not None:
        figures["transformers_ms"] = theirs
    for name, value in figures.items():
        print(f"{name:24} {value:10.3f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
